"""The Triton kernel behind `PagedKVCache.write`. Imported only where Triton is."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _write_pages(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_row,
    k_head,
    v_row,
    v_head,
    page_stride,
    offset_stride,
    head_stride,
    page_size,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)
    inside = column < HEAD_DIM
    target = (slot // page_size) * page_stride + (slot % page_size) * offset_stride + head * head_stride + column
    key = tl.load(k_ptr + token * k_row + head * k_head + column, mask=inside)
    tl.store(k_cache_ptr + target, key, mask=inside)
    value = tl.load(v_ptr + token * v_row + head * v_head + column, mask=inside)
    tl.store(v_cache_ptr + target, value, mask=inside)


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, page_size: int, layout: str
) -> None:
    """Write tokens to their slots.

    Args:
        k: (T, num_kv_heads, head_dim).
        v: as `k`.
        k_cache: (num_pages, ...) of one layer.
        v_cache: as `k_cache`, with the same strides.
        slots: (T,) int64, page * page_size + offset; -1 for none.
        page_size: tokens in a page.
        layout: NHD or HND.
    """
    tokens, heads, head_dim = k.shape
    k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k, v))
    offset, head = (1, 2) if layout == "NHD" else (2, 1)
    _write_pages[(tokens, heads)](
        k,
        v,
        k_cache,
        v_cache,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(offset),
        k_cache.stride(head),
        page_size,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
