"""One attempt of one round. PURE."""
