"""What a federation and its sites are set up with, without a daemon."""
