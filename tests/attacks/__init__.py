"""Attacks: what somebody tries, why it fails, and that it works with the defence removed."""
