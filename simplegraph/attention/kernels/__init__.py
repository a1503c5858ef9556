"""Triton kernels of the paged cache, and a float64 reference; the backends decide when to launch them.

decode  attention of a few tokens per request over its pages
mamba2  the convolution and the recurrence of Mamba2
pages   FlashInfer's list of pages
"""
