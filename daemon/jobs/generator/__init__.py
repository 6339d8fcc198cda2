"""Jobs of the learning worker that train the generator, and judge it."""
