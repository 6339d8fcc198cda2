"""Tests of peers/rounds/."""
