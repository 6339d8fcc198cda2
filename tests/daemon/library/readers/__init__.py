"""Tests of daemon/library/readers/."""
