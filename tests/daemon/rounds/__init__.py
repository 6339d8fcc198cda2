"""Tests of daemon/rounds/."""
