"""Retriever, training, evaluation: the home of torch and transformers."""
