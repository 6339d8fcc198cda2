"""Tests of daemon/fedctl/."""
