"""Documents and pairs on their way: from files to the daemon, and from it to a file."""
