"""Tests of peers/attempts/."""
