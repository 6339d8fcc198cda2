"""The jobs of secure sums: an update as integers, hidden, added, and the sum as a version."""
