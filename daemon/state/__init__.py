"""What a site keeps on disk."""
