"""Decoder-only transformers."""
