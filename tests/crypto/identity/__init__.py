"""Tests of crypto/identity/."""
