"""Tests of daemon/library/."""
