"""What goes wrong in a simulated federation, and what must hold."""
