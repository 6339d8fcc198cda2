"""What embeddings tell of texts."""
