"""Programs of attackers: a changed `fedd`, and callers that are none."""
