"""Triton kernels of `PagedKVCache.write` and of FlashInfer's list of pages.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
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
    """Write keys and values to their slots, one program per token and head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
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
        k_cache: (num_pages, ...), the pages of one layer; written.
        v_cache: as `k_cache`, with the same strides.
        slots: (T,) int64, page * page_size + offset; rows with -1 are skipped.
        page_size: tokens in a page.
        layout: "NHD" or "HND".
    """
    tokens, heads, head_dim = k.shape
    k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k, v))
    offset, head = (1, 2) if layout == "NHD" else (2, 1)
    with torch.cuda.device_of(k):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _write_pages[(tokens, heads)](
            *(k, v, k_cache, v_cache, slots),
            *(*k.stride()[:2], *v.stride()[:2]),
            *(k_cache.stride(0), k_cache.stride(offset), k_cache.stride(head)),
            page_size,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=1,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _list_pages(table_ptr, indptr_ptr, indices_ptr, row_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """List the pages of each request, one program per request."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - start
    for first in range(0, count, BLOCK):
        column = first + tl.arange(0, BLOCK)
        page = tl.load(table_ptr + row * row_stride + column, mask=column < count)
        tl.store(indices_ptr + start + column, page, mask=column < count)


def list_pages(block_table: Tensor, indptr: Tensor, indices: Tensor) -> None:
    """Write the pages of all requests one after the other.

    Args:
        block_table: (num_reqs, max_blocks) int32, page ids.
        indptr: (num_reqs + 1,) int32, where each request's pages begin in `indices`.
        indices: (at least ``indptr[-1]``,) int32; written.
    """
    with torch.cuda.device_of(indices):  # type: ignore[no-untyped-call]
        _list_pages[(len(block_table),)](block_table, indptr, indices, block_table.stride(0), BLOCK=1024, num_warps=4)
