"""Fixtures that several test files use."""

pytest_plugins = ["tests.command_line"]
