"""Paged attention as one operator, which every arm runs and at which compilers split.

The first page of a cache is scratch: padding rows write there, and it is never read by a
live row. Live requests own pages 1 and up.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_SPLITS = 32

FLASH_MODULES = ("vllm_flash_attn", "vllm.vllm_flash_attn", "flash_attn_interface")

_SCHEMA = (
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out, "
    "Tensor slots, Tensor seq_lens, Tensor block_table, Tensor query_start_loc, float scale) -> ()"
)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> None:
    """Write this step's keys and values to the cache, then attend; one token per request.

    Args:
        q: (T, num_heads, head_dim).
        k, v: (T, num_kv_heads, head_dim).
        k_cache, v_cache: (num_pages, page_size, num_kv_heads, head_dim); written at `slots`.
        out: (T, num_heads, head_dim); written. Rows whose length is 0 hold finite values of no meaning.
        slots: (T,) int64, page * page_size + offset; padding rows name a slot of the scratch page.
        seq_lens: (T,) int32, tokens in each request's cache, this one included; 0 for padding.
        block_table: (T, max_blocks) int32, page ids.
        query_start_loc: (T + 1,) int32, 0, 1, ... T.
        scale: factor on the scores.
    """
    write_cache(k, v, k_cache, v_cache, slots)
    flash = flash_attention(q)
    if flash is None:
        _gathered_attention(q, k_cache, v_cache, out, seq_lens, block_table, scale)
    else:
        run_flash(flash, q, k_cache, v_cache, out, seq_lens, block_table, query_start_loc, scale, max_query_len=1)


# The function that the model calls unless it is compiled; see `routed`.
attend: Callable[..., None] = paged_attention


@contextlib.contextmanager
def routed(function: Callable[..., None]) -> Iterator[None]:
    """Make models in this context call `function` instead of `paged_attention`, for arms that break at that call."""
    global attend
    before, attend = attend, function
    try:
        yield
    finally:
        attend = before


def write_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Write this step's keys and values to their `slots`."""
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def run_flash(
    flash: ModuleType,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    scale: float,
    *,
    max_query_len: int,
) -> None:
    """Run FlashAttention-3 on requests of up to `max_query_len` tokens each, causal within a request.

    Args:
        flash: the module that `flash_attention` returns.
        q, out: (T, num_heads, head_dim), the requests' tokens one after the other.
        seq_lens: (num_reqs,) int32, tokens in each request's cache, this step's included.
        block_table: (num_reqs, max_blocks) int32.
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin.
    """
    common = {
        "cu_seqlens_q": query_start_loc,
        "max_seqlen_q": max_query_len,
        "softmax_scale": scale,
        "causal": True,
        "num_splits": _num_splits(q, k_cache),
    }
    if flash.__name__ == "flash_attn_interface" and hasattr(flash, "flash_attn_with_kvcache"):
        # The authors' build returns its output.
        result = flash.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=seq_lens, page_table=block_table, **common
        )
        out.copy_(result[0] if isinstance(result, tuple) else result)
        return
    # vLLM's build computes its schedule from the lengths on the device, in a replay as well.
    flash.flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        max_seqlen_k=block_table.shape[1] * k_cache.shape[1],
        seqused_k=seq_lens,
        block_table=block_table,
        out=out,
        fa_version=3,
        **common,
    )


def attention_name(device: torch.device, dtype: torch.dtype) -> str:
    """Name the implementation that `paged_attention` uses for tensors of this device and dtype."""
    flash = flash_attention(torch.empty(0, device=device, dtype=dtype))
    return "SDPA over gathered pages" if flash is None else f"FlashAttention-3 ({flash.__name__})"


def flash_attention(q: Tensor) -> ModuleType | None:
    """Return the FlashAttention-3 module for these queries, or None if none can be used."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    return _flash_module(q.device)


_flash_modules: dict[torch.device, ModuleType | None] = {}


def _flash_module(device: torch.device) -> ModuleType | None:
    if device not in _flash_modules:
        found = (_import_flash(name, device) for name in FLASH_MODULES)
        _flash_modules[device] = next((module for module in found if module is not None), None)
    return _flash_modules[device]


def _import_flash(name: str, device: torch.device) -> ModuleType | None:
    """Import the module; None unless that works and it has version 3 for this device."""
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):  # absent, or built for another torch
        return None
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None
    # Checked by its flag: the kernels' own check needs the rest of vLLM installed.
    return module if getattr(module, "FA3_AVAILABLE", True) else None


def _num_splits(q: Tensor, k_cache: Tensor) -> int:
    """Return the most splits of FlashAttention's split-KV: enough for four pieces of work per multiprocessor.

    It depends on shapes alone, so that capture and replay agree: with different bounds the kernel reads out of bounds.
    The kernel allocates that many float32 outputs.
    """
    tiles = q.shape[0] * k_cache.shape[2]
    return max(1, min(MAX_SPLITS, 4 * _multiprocessors(q.device) // tiles))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _gathered_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, seq_lens: Tensor, block_table: Tensor, scale: float
) -> None:
    """Compute plain attention over the pages of each request, on any device; no shape depends on the lengths."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    keys = _gather(k_cache, block_table)
    # Clamped to one key: a row of no keys would be a softmax over nothing, which is NaN.
    lengths = seq_lens.clamp(min=1)
    mask = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    # The query heads that share a key head are laid out as the tokens of one longer query.
    grouped = (num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    result = F.scaled_dot_product_attention(
        q.reshape(grouped), keys, _gather(v_cache, block_table), attn_mask=mask[:, None, None, :], scale=scale
    )
    out.view(grouped).copy_(result)


def _gather(cache: Tensor, block_table: Tensor) -> Tensor:
    """Gather the pages of each request: (T, num_kv_heads, max_blocks * page_size, head_dim)."""
    pages = cache.index_select(0, block_table.flatten())
    return pages.view(block_table.shape[0], -1, *cache.shape[2:]).transpose(1, 2)


def unsafe_tags() -> tuple[torch.Tag, ...]:
    """Return the tags by which Inductor keeps this operator out of its own CUDA graphs."""
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    return () if tag is None else (tag,)


# Not defined by `custom_op`, whose checks would cost every layer of the eager arm tens of microseconds.
_library = torch.library.Library("bench", "FRAGMENT")
_library.define(_SCHEMA, tags=unsafe_tags())
for _key in ("CPU", "CUDA"):
    _library.impl("paged_attention", paged_attention, _key)
_library._register_fake("paged_attention", lambda *args: None)
