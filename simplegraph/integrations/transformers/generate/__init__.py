"""Decoding through graphs for a model's `generate`; the kernels of a step are in `kernels`."""
