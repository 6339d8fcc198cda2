"""The index of vectors: nearest passages by cosine, on disk, in small changes."""
