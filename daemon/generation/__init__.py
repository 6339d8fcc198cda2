"""Generators: passages and a question to an answer with citations."""
