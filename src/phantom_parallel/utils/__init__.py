"""Helpers that know nothing of the method: sizes, files, random streams, progress."""
