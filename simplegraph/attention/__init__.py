"""What a captured attention reads: paged KV cache, metadata, backends.

Example:
    >>> cache = PagedKVCache(32, 1000, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    >>> metadata = BatchMetadata(max_num_tokens=512, max_num_reqs=64, max_model_len=4096, page_size=16, device="cuda")
    >>> backend = FlashAttentionBackend(cache, metadata, num_heads=32)
    >>> manager = CudaGraphManager(device="cuda", support=backend.support, max_num_seqs=64)
    >>> manager.add_hooks(backend)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from simplegraph.errors import ConfigError

if TYPE_CHECKING:
    from simplegraph.attention.backend import AttentionBackend as AttentionBackend
    from simplegraph.attention.backend import BackendGroup as BackendGroup
    from simplegraph.attention.backend import attend as attend
    from simplegraph.attention.backend import attending as attending
    from simplegraph.attention.backend import minimum_support as minimum_support
    from simplegraph.attention.backends.context_parallel import ContextParallelBackend as ContextParallelBackend
    from simplegraph.attention.backends.flash_attention import FlashAttention2Backend as FlashAttention2Backend
    from simplegraph.attention.backends.flash_attention import FlashAttentionBackend as FlashAttentionBackend
    from simplegraph.attention.backends.flashinfer import FlashInferBackend as FlashInferBackend
    from simplegraph.attention.backends.sdpa import SDPABackend as SDPABackend
    from simplegraph.attention.backends.triton_decode import TritonDecodeBackend as TritonDecodeBackend
    from simplegraph.attention.cache import PagedKVCache as PagedKVCache
    from simplegraph.attention.kernels.reference import reference_attention as reference_attention
    from simplegraph.attention.metadata.batch_metadata import BatchMetadata as BatchMetadata
    from simplegraph.attention.metadata.batch_state import CommonMetadata as CommonMetadata
    from simplegraph.attention.metadata.requests import ContextShare as ContextShare

_HOMES = {
    "backend": ("AttentionBackend", "BackendGroup", "attend", "attending", "minimum_support"),
    "cache": ("PagedKVCache",),
    "backends.context_parallel": ("ContextParallelBackend",),
    "backends.flash_attention": ("FlashAttention2Backend", "FlashAttentionBackend"),
    "backends.flashinfer": ("FlashInferBackend",),
    "metadata.requests": ("ContextShare",),
    "metadata.batch_metadata": ("BatchMetadata",),
    "kernels.reference": ("reference_attention",),
    "backends.sdpa": ("SDPABackend",),
    "metadata.batch_state": ("CommonMetadata",),
    "backends.triton_decode": ("TritonDecodeBackend",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'simplegraph.attention' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"simplegraph.attention.{_HOME_OF[name]}")
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ConfigError(
            "simplegraph.attention needs numpy; to have it: pip install 'simplegraph[attention]'"
        ) from error
    value = globals()[name] = getattr(home, name)
    return value
