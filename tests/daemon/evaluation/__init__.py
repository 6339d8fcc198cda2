"""Tests of daemon/evaluation/."""
