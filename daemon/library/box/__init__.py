"""Readers in boxes: a process for each file, and what it may tell."""
