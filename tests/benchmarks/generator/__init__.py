"""What a federation makes of its generator, and what that takes."""
