"""fedctl: the operator's command line."""
