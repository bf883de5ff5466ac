"""Comparisons at equal loss, sweeps, and the reports on them."""
