"""Drawn scenarios for the simulation: schedules of faults, invariants, planted bugs."""
