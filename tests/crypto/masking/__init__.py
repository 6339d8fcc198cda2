"""Tests of crypto/masking/."""
