"""A Triton kernel for attention of a few query tokens per request over its pages, split into parts if that helps.

Imported only if Triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching

BLOCK = 64  # keys that are read at a time, and the smallest part
_LOG2E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    target,
    used,
    result,
    top,
    total,
    lse_target,
    exists,
    sink,
    WITH_LSE: tl.constexpr,
    WITH_SINKS: tl.constexpr,
):
    """Store each row's weighted mean, zeros if it saw no key, and the log-sum-exp of its scores to the base e.

    A sink is one more score, to the base 2, whose value is zero; the log-sum-exp leaves it out.
    """
    if WITH_LSE:
        tl.store(lse_target, (top + tl.log2(tl.where(total > 0, total, 1.0))) * 0.6931471805599453, exists)
    if WITH_SINKS:
        higher = tl.maximum(top, sink)
        faded = tl.exp2(top - higher)
        total = total * faded + tl.exp2(sink - higher)
        result = result * faded[:, None]
    total = tl.where(total > 0, total, 1.0)
    tl.store(target, (result / total[:, None]).to(target.dtype.element_ty), used)


@triton.jit  # type: ignore[untyped-decorator]
def _put_part(  # type: ignore[no-untyped-def]
    first_part, index, result, top, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write a part of a sequence, for the last one to add up: (ROWS, COLUMNS), then (ROWS,) twice."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    part = first_part + index * (ROWS * COLUMNS + 2 * ROWS)
    tl.store(part + row[:, None] * COLUMNS + column[None, :], result)
    tl.store(part + ROWS * COLUMNS + row, top)
    tl.store(part + ROWS * COLUMNS + ROWS + row, total)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_parts(first_part, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add up the parts of a sequence: the weighted sum of each row, its highest score and its sum of weights."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(parts):
        part = first_part + index * (ROWS * COLUMNS + 2 * ROWS)
        # Read from L2, which all multiprocessors share: L1 may hold stale values.
        its_result = tl.load(part + row[:, None] * COLUMNS + column[None, :], cache_modifier=".cg")
        its_top = tl.load(part + ROWS * COLUMNS + row, cache_modifier=".cg")
        its_total = tl.load(part + ROWS * COLUMNS + ROWS + row, cache_modifier=".cg")
        higher = tl.maximum(top, its_top)
        faded, weight = tl.exp2(top - higher), tl.exp2(its_top - higher)
        total = total * faded + its_total * weight
        result = result * faded[:, None] + its_result * weight[:, None]
        top = higher
    return result, top, total


# The first layer's launch loads the kernel for all: its sinks may lie at another alignment than theirs.
@triton.jit(do_not_specialize=["num_splits", "sinks_ptr"])  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    parts_ptr,
    arrived_ptr,
    scale,
    softcap,
    num_splits,
    q_row,
    q_head,
    out_row,
    out_head,
    table_row,
    page_stride,
    offset_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_PARTS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend, one program per request, key head and part of the sequence; the last part to finish adds them all up.

    A row is a query token and one of the query heads that share the key head.
    """
    await_others(EARLY)
    request, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths_ptr + request)
    begin = 0  # the first key that a token of the request sees
    if WINDOW > 0:
        begin = tl.maximum(length - QUERY_LEN + 1 - WINDOW, 0)
    part = length - begin
    if IN_PARTS:
        part = tl.cdiv(tl.cdiv(length - begin, num_splits), BLOCK) * BLOCK
    start = begin + split * part
    if start >= length:
        return
    row, column, key = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    inside = (column < HEAD_DIM)[None, :]
    exists = row < QUERY_LEN * GROUP
    used = exists[:, None] & inside
    token = request * QUERY_LEN + row // GROUP
    q_heads = head * GROUP + row % GROUP
    seen = length - QUERY_LEN + 1 + row // GROUP  # keys that a row sees: its own and those before it
    sink = tl.zeros((ROWS,), tl.float32)
    if WITH_SINKS:
        sink = tl.load(sinks_ptr + q_heads, exists, 0.0).to(tl.float32) * 1.4426950408889634
    q = tl.load(q_ptr + (token * q_row + q_heads * q_head)[:, None] + column[None, :], used, 0.0)

    # Not -inf: a row that sees no key of this part would compute -inf minus -inf, which is NaN.
    top = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, tl.minimum(start + part, length), BLOCK):
        place = first + key
        there = place < length
        page = tl.load(table_ptr + request * table_row + place // PAGE_SIZE, there, 0).to(tl.int64)
        address = page * page_stride + (place % PAGE_SIZE) * offset_stride + head * head_stride
        # Masked, not multiplied by zero: pages may hold NaN where nothing was written.
        taken = there[:, None] & inside
        keys = tl.load(keys_ptr + address[:, None] + column[None, :], taken, 0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:  # tanh(x) is 2 * sigmoid(2 * x) - 1; scale and softcap are to the base 2
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        sees = (place[None, :] < seen[:, None]) & there[None, :]
        if WINDOW > 0:
            sees = sees & (place[None, :] >= seen[:, None] - WINDOW)
        scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        faded = tl.exp2(top - higher)
        values = tl.load(values_ptr + address[:, None] + column[None, :], taken, 0.0)
        total = total * faded + tl.sum(weights, 1)
        result = result * faded[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = higher

    parts = 1
    if IN_PARTS:
        parts = tl.cdiv(length - begin, part)
    target = out_ptr + (token * out_row + q_heads * out_head)[:, None] + column[None, :]
    lse_target = lse_ptr + token * (tl.num_programs(1) * GROUP) + q_heads
    if parts == 1:
        _store(target, used, result, top, total, lse_target, exists, sink, WITH_LSE, WITH_SINKS)
    else:
        place = request * tl.num_programs(1) + head
        first_part = parts_ptr + place * num_splits * (ROWS * COLUMNS + 2 * ROWS)
        _put_part(first_part, split, result, top, total, ROWS, COLUMNS)
        tl.debug_barrier()  # all threads must have stored before one counts the part as finished
        before = tl.atomic_add(arrived_ptr + place, 1)
        if before == parts - 1:
            tl.store(arrived_ptr + place, 0)  # for the next layer
            result, top, total = _sum_parts(first_part, parts, ROWS, COLUMNS)
            _store(target, used, result, top, total, lse_target, exists, sink, WITH_LSE, WITH_SINKS)


def rows_of(query_len: int, group: int) -> int:
    """Return the rows that a program works on: a power of 2, at least 16 as matrix products need."""
    return max(16, int(triton.next_power_of_2(query_len * group)))


def columns_of(head_dim: int) -> int:
    """Return the elements of a head that a program works on: a power of 2, at least 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def part_size(rows: int, head_dim: int) -> int:
    """Return the count of float32 numbers that one part of a sequence stores for the last one to add up."""
    return rows * columns_of(head_dim) + 2 * rows


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    query_len: int,
    scale: float,
    layout: str,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    num_splits: int,
    parts: Tensor,
    arrived: Tensor,
) -> None:
    """Compute causal attention of requests with `query_len` tokens each.

    Args:
        q: (T, num_heads, head_dim), T at least num_reqs * query_len; the elements of a head are contiguous.
        keys: pages of one layer; see `PagedKVCache`.
        values: as `keys`, with the same strides.
        block_table: (num_reqs, max_blocks) int32, page ids.
        seq_lens: (num_reqs,) int32, this step's tokens included; rows of requests with 0 are not written.
        out: written; as `q`.
        query_len: tokens of each request.
        scale: factor on the scores.
        layout: "NHD" or "HND".
        window: keys that a token sees, its own included; None for all before it.
        softcap: bound of the scores; None for no bound.
        sinks: (num_heads,) of any floating dtype, contiguous, one more score for each head; None for none.
        lse: (T, num_heads) float32, contiguous; written with the log-sum-exp of each row's scores, to the base e.
        num_splits: the most parts that a sequence is split into.
        parts: float32, ``num_reqs * num_kv_heads * num_splits * part_size(...)`` at least, unless `num_splits` is 1.
        arrived: (at least num_reqs * num_kv_heads,) int32 zeros; zeros again after the call.
    """
    offset, head = (1, 2) if layout == "NHD" else (2, 1)
    num_kv_heads, head_dim = keys.shape[head], keys.shape[3]
    group = q.shape[1] // num_kv_heads
    wide = keys.element_size() * head_dim > 256  # halve the block, to fit a multiprocessor's shared memory
    with launching(q) as early:
        _decode[(len(seq_lens), num_kv_heads, num_splits)](
            *(q, keys, values, block_table, seq_lens, out, out if lse is None else lse),
            *(out if sinks is None else sinks, parts, arrived),
            *(scale * _LOG2E, 0.0 if softcap is None else softcap * _LOG2E, num_splits),
            *(*q.stride()[:2], *out.stride()[:2], block_table.stride(0)),
            *(keys.stride(0), keys.stride(offset), keys.stride(head)),
            PAGE_SIZE=keys.shape[offset],
            QUERY_LEN=query_len,
            GROUP=group,
            ROWS=rows_of(query_len, group),
            HEAD_DIM=head_dim,
            COLUMNS=columns_of(head_dim),
            BLOCK=BLOCK // 2 if wide else BLOCK,
            IN_PARTS=num_splits > 1,
            WITH_LSE=lse is not None,
            WINDOW=0 if window is None else window,
            CAPPED=softcap is not None,
            WITH_SINKS=sinks is not None,
            num_warps=4,
            num_stages=2,
            **early,
        )
