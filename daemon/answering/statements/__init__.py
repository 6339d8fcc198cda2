"""What answers state: what a model wrote, made plain, what supports it; rows of tables told."""
