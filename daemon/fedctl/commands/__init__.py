"""fedctl's commands, a file a topic."""
