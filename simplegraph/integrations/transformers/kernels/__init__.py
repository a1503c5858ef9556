"""Holds what captured steps run in place of several of a model's operators; it knows no graphs and no `generate`."""
