"""See `daemon.fedctl.transfer`."""
