"""Ranks: how they are launched, which of them share a model, and how they agree on Python objects."""
