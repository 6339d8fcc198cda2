"""The generator that sites train together: its versions here, and which of them answers."""
