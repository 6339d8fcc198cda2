"""What fedctl may ask of its own daemon."""
