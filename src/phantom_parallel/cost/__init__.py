"""Counting and planning: formulas, the ledger that counts running code, dry runs, hardware profiles and the planner."""
