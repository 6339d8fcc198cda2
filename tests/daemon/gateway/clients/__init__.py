"""People's programs as they come from their makers, each in an environment of its own."""
