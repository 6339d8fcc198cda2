"""Simulated federations: `python -m tests.simulation --seeds 1000`."""
