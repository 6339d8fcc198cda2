"""The rounds of a federation, as every site decides them. PURE."""
