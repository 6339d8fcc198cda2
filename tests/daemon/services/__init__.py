"""Tests of daemon/services/."""
