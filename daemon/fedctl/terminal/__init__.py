"""What every command has: options, output, the connection, the files that people name."""
