"""Triton kernels of the paged cache, and a float64 reference; the backends decide when to launch them."""
