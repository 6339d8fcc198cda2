"""How well rankings find what they should."""
