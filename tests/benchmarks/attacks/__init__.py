"""What a liar, or a curious site, gets out of it."""
