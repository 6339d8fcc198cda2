"""Attacks, each against this code and against the same code without the defence."""
