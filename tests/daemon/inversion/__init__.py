"""Tests of daemon/inversion/."""
