"""Backends of paged attention, one file for each library or kernel; their base class is in `attention.backend`.

sdpa              the reference: torch over gathered pages, on any device
triton_decode     decode by a Triton kernel
flash_attention   FlashAttention 2 and 3
flash_kernels     finds FlashAttention's kernels, and tells how their builds differ
flashinfer        FlashInfer
context_parallel  each rank attends to its part of a sequence
"""
