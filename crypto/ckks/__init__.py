"""Sums of encrypted integers: CKKS, dot products, the proof of a sum."""
