"""Tests of daemon/personal/."""
