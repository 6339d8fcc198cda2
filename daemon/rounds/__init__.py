"""The driver of rounds: effects of the protocol become work."""
