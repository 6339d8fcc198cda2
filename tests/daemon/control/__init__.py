"""Tests of daemon/control/."""
