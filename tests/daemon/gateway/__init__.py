"""Tests of daemon/gateway."""
