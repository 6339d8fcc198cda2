"""What trains, on how many processors and in how many processes."""
