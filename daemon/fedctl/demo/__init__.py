"""A whole federation on one machine, from nothing to answers."""
