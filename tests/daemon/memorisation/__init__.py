"""Tests of daemon/memorisation/."""
