"""The model that finds passages."""
