"""Tests of daemon/jobs/."""
