"""What worker processes run."""
