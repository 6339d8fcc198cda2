"""Tests of daemon/pairs/."""
