"""What institutions say to each other."""
