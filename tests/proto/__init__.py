"""Tests of proto/."""
