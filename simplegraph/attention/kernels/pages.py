"""A Triton kernel for FlashInfer's list of pages.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
