"""See `daemon.fedctl.commands.evaluation`."""
