"""Tests of crypto/ckks/."""
