"""What the operator chooses."""
