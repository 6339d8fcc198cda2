"""Tests of daemon/learning/."""
