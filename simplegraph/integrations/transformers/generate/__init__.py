"""Holds decoding through graphs for a model's `generate`; what a step's kernels are stands in `kernels`."""
