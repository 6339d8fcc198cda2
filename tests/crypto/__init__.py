"""Tests of crypto/."""
