"""Triton kernels of the paged cache, and a float64 reference; when a kernel runs is for backends to say."""
