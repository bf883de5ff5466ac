"""Conversion of trained dense models to phantom models, and their healing. Above families, since it converts them."""
