"""Tests of daemon/questions."""
