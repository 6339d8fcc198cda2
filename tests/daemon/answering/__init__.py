"""Tests of daemon/answering/."""
