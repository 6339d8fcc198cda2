"""Tests of daemon/answering/statements/."""
