"""Phantom layers in trainers that have models of their own; each module needs the package that it is named after."""
