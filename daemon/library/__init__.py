"""A site's documents: passages, words, vectors, search."""
