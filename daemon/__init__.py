"""What one institution does inside its walls."""
