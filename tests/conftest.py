"""Fixtures that several test files use."""

import os

pytest_plugins = ["tests.command_line"]

# Tables are as wide as `fedctl` makes them for a file, whatever the terminal is of whoever
# runs the tests (pytest-xdist, too, sets this).
os.environ.pop("COLUMNS", None)
