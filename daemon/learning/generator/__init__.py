"""The language model that a federation trains to write answers."""
