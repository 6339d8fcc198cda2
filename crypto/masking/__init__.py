"""Sums of masked integers: secure aggregation by double masking."""
