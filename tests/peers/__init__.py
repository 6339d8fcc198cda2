"""Tests of peers/."""
