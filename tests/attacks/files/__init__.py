"""Attacks by files that somebody sent to a site."""
