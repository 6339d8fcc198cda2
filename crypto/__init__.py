"""What keeps secrets."""
