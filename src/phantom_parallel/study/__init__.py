"""Comparisons at equal loss, and studies: settings, runner, search, analysis and results."""
