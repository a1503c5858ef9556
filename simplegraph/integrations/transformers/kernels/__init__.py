"""Fused kernels that captured steps run instead of several of a model's operators. No graphs, no `generate`."""
