"""Tests of peers/wire/."""
