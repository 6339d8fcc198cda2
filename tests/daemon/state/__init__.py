"""Tests of daemon/state/."""
