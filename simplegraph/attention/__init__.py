"""Attention for captured steps: paged KV cache, step metadata, backends. No model, scheduler or sampling.

backend    the base class of backends, and the function by which layers call them
backends   one file for each library or kernel
cache      the paged KV cache, and the kernel that writes to it
metadata   what a step says: lengths, pages and slots
layers     backends of a model with several kinds of layers
recurrent  layers with a state in place of a cache
kernels    Triton kernels, and the reference in float64
two_batch  two micro-batches in one graph

Example:
    >>> cache = PagedKVCache(32, 1000, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> metadata = BatchMetadata(max_num_tokens=512, max_num_reqs=64, max_model_len=4096, page_size=16, device="cuda")
    >>> backend = FlashAttentionBackend(cache, metadata, num_heads=32)
    >>> manager = CudaGraphManager(device="cuda", support=backend.support, max_num_seqs=64)
    >>> manager.add_hooks(backend)
"""

from __future__ import annotations

from simplegraph._lazy import public_names

__all__, __getattr__ = public_names(__name__, __file__)
