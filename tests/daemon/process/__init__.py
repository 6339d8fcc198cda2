"""Tests of daemon/process/."""
