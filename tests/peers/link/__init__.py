"""Tests of peers/link/."""
