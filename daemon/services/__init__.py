"""What runs beside rounds."""
