"""Attacks, each made twice: against the defence, and with the defence removed."""
