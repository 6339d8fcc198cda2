"""A library of some collections alone, in memory, for who may ask of these."""
