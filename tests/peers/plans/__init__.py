"""Tests of peers/plans/."""
