"""What a plan says: weights, the robust rule, and what a site agrees to. PURE."""
