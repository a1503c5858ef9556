"""Triton kernels for one token per row: a linear layer of a single row, and attention of one query per row.

Imported only if Triton is installed. cuBLAS's smallest tiles leave most of a GPU idle for a single row, and fused
attention's most of it for a single query, where only the reading of weights, keys and values counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching, times_active

MAX_ELEMENTS = 256  # of a head
MAX_TOGETHER = 3  # linear layers of one launch
_LOG2E = 1.4426950408889634
_ROWS, _BLOCK = 2, 1024  # of a weight, that a program reads at a time
_KEPT = 16384  # bytes of keys, and of values, that a program of `attend` holds at a time
_MAX_KEYS, _FEWEST_KEYS = 128, 32
_PARTS = 16  # of a row's keys, up to which more of them take less time
_PROGRAMS = 528  # four for each multiprocessor of an H100


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    index,
    outputs,
    weight_row,
    BIASED: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply some rows of a weight with a vector, in float32; return the results to store."""
    row = index * ROWS + tl.arange(0, ROWS)
    exists = row < outputs
    start = weight_ptr + row.to(tl.int64)[:, None] * weight_row
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in tl.static_range(0, INPUTS, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < INPUTS
        x = tl.load(x_ptr + column, inside, 0.0).to(tl.float32)
        weight = tl.load(start + column[None, :], exists[:, None] & inside[None, :], 0.0).to(tl.float32)
        total += weight * x[None, :]
    result = tl.sum(total, 1)
    if BIASED:
        result += tl.load(bias_ptr + row, exists, 0.0).to(tl.float32)
    rounded = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row, rounded, exists)
    return rounded.to(tl.float32)


# One variant serves all layers of as many inputs, and their trial.
@triton.jit(do_not_specialize=["outputs", "outputs_1", "outputs_2"])  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    weight_ptr_1,
    weight_ptr_2,
    bias_ptr,
    bias_ptr_1,
    bias_ptr_2,
    out_ptr,
    out_ptr_1,
    out_ptr_2,
    outputs,
    outputs_1,
    outputs_2,
    weight_row,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute some outputs in each program: of the first layer, then of the second and the third.

    With a kind, those of a gate and of what it multiplies together, and their product.
    """
    await_others(EARLY)
    index = tl.program_id(0)
    if KIND == "":
        first, second = tl.cdiv(outputs, ROWS), tl.cdiv(outputs_1, ROWS)
        if index >= first + second:
            index -= first + second
            weight_ptr, bias_ptr, out_ptr, outputs = weight_ptr_2, bias_ptr_2, out_ptr_2, outputs_2
        elif index >= first:
            index -= first
            weight_ptr, bias_ptr, out_ptr, outputs = weight_ptr_1, bias_ptr_1, out_ptr_1, outputs_1
    gate = _multiply(x_ptr, weight_ptr, bias_ptr, out_ptr, index, outputs, weight_row, BIASED, INPUTS, ROWS, BLOCK)
    if KIND != "":
        up = _multiply(
            *(x_ptr, weight_ptr_1, bias_ptr_1, out_ptr_1, index, outputs, weight_row, BIASED, INPUTS, ROWS, BLOCK)
        )
        row = index * ROWS + tl.arange(0, ROWS)
        tl.store(out_ptr_2 + row, times_active(up, gate, KIND).to(out_ptr_2.dtype.element_ty), row < outputs)


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kind: str) -> list[Tensor]:
    """Compute linear layers of a single row, in float32 and rounded once.

    Args:
        x: (..., inputs), of one row; float32, bfloat16 or float16.
        weights: (outputs, inputs) of each layer, at most `MAX_TOGETHER`, the dtype of `x`; their rows are contiguous,
            and equally far apart.
        biases: (outputs,) of each, contiguous, the dtype of `x`; None for nothing, in all or none.
        kind: of the activation, if there are two layers of as many outputs, and the first is a gate; "" for none.

    Returns:
        (..., outputs) of each; with a kind, the product of the gate's activation and the second, too.
    """
    inputs, missing = weights[0].shape[1], MAX_TOGETHER - len(weights)
    results = [*weights, *weights[: bool(kind)]]
    outs = [torch.empty((*x.shape[:-1], len(weight)), dtype=x.dtype, device=x.device) for weight in results]
    added = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    sizes = [len(weight) for weight in weights]
    with launching(x) as early:
        _linear[(sum(triton.cdiv(size, _ROWS) for size in sizes[: 1 if kind else None]),)](
            x.contiguous(),
            *(*weights, *[weights[0]] * missing),
            *(*added, *added[:1] * missing),
            *(*outs, *outs[:1] * (MAX_TOGETHER - len(outs))),
            *(*sizes, *sizes[:1] * missing),
            weights[0].stride(0),
            KIND=kind,
            BIASED=biases[0] is not None,
            INPUTS=inputs,
            ROWS=_ROWS,
            BLOCK=min(triton.next_power_of_2(inputs), _BLOCK),
            num_warps=4,
            **early,
        )
    return outs


@triton.jit(do_not_specialize=["keys", "part", "mask_row"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    bias_ptr,
    out_ptr,
    scale,
    keys,
    part,
    q_row,
    q_head,
    k_row,
    k_head,
    k_key,
    v_row,
    v_head,
    v_key,
    mask_row,
    mask_key,
    bias_row,
    bias_head,
    bias_key,
    MASKED: tl.constexpr,
    BIASED: tl.constexpr,
    IN_PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ELEMENTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend to a part of the keys of one head, for the queries that share it; parts are (COLUMNS + 2) float32 each."""
    await_others(EARLY)
    head, row, index = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    query, column = tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    inside, exists = (column < ELEMENTS)[None, :], query < GROUP
    q_index = head * GROUP + query
    used = exists[:, None] & inside
    q = tl.load(q_ptr + row * q_row + q_index[:, None] * q_head + column[None, :], used, 0.0)
    k_start = k_ptr + row * k_row + head * k_head + column[None, :]
    v_start = v_ptr + row * v_row + head * v_head + column[None, :]
    top = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    result = tl.zeros((QUERIES, COLUMNS), tl.float32)
    for begin in range(index * part, tl.minimum(index * part + part, keys), KEYS):
        key = begin + tl.arange(0, KEYS)
        seen = key < keys
        loaded = seen[:, None] & inside
        place = key.to(tl.int64)[:, None]
        k = tl.load(k_start + place * k_key, loaded, 0.0)
        v = tl.load(v_start + place * v_key, loaded, 0.0)
        if MASKED:
            seen = seen & (tl.load(mask_ptr + row * mask_row + key * mask_key, seen, 0) != 0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if BIASED:
            place = row * bias_row + q_index[:, None] * bias_head + key[None, :] * bias_key
            bias = tl.load(bias_ptr + place, exists[:, None] & seen[None, :], 0.0)
            score += bias.to(tl.float32) * 1.4426950408889634
        score = tl.where(seen[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.where(seen[None, :], tl.exp2(score - higher[:, None]), 0.0)
        faded = tl.exp2(top - higher)
        total = total * faded + tl.sum(weight, 1)
        v = tl.where(seen[:, None], v, 0.0).to(v.dtype)  # unwritten memory may hold NaN
        result = result * faded[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    place = row * (tl.num_programs(0) * GROUP) + q_index
    if IN_PARTS:
        own = out_ptr + (place * tl.num_programs(2) + index) * (COLUMNS + 2)
        tl.store(own[:, None] + column[None, :], result, exists[:, None])
        tl.store(own + COLUMNS, top, exists)
        tl.store(own + COLUMNS + 1, total, exists)
    else:
        result /= tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptr + place[:, None] * ELEMENTS + column[None, :], result.to(out_ptr.dtype.element_ty), used)


@triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]
def _sum_parts(  # type: ignore[no-untyped-def]
    parts_ptr, out_ptr, parts, ELEMENTS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr
):
    """Add up the parts of one query."""
    await_others(EARLY)
    query, column, part = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS), tl.arange(0, PARTS)
    exists = part < parts
    own = parts_ptr + (query * parts + part) * (COLUMNS + 2)
    top = tl.load(own + COLUMNS, exists, -1e30)
    total = tl.load(own + COLUMNS + 1, exists, 0.0)
    result = tl.load(own[:, None] + column[None, :], exists[:, None], 0.0)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(total * weight, 0)
    result = tl.sum(result * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + query * ELEMENTS + column, result.to(out_ptr.dtype.element_ty), column < ELEMENTS)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
    """Attend with one query per row, with scores and sums in float32.

    In half precision the weights of the values are rounded to its dtype, as torch's fused attention rounds them.

    Args:
        q: (rows, heads, 1, elements), at most `MAX_ELEMENTS`, the last dimension contiguous; float32, bfloat16 or
            float16.
        k: (rows, kv_heads, keys, elements), the last dimension contiguous; `heads` is a multiple of `kv_heads`.
        v: as `k`.
        mask: (rows or 1, 1, 1, keys) bool, True for keys that are seen; None for all.
        bias: (rows or 1, heads or 1, 1, keys), added to the scores; None for nothing.
        scale: of the scores.

    Returns:
        (rows, 1, heads, elements); zeros for rows that see no key.
    """
    rows, heads, _, elements = q.shape
    kv_heads, keys = k.shape[1:3]
    group, columns = heads // kv_heads, max(16, triton.next_power_of_2(elements))
    most = max(16, min(_KEPT // (columns * k.element_size()), _MAX_KEYS))
    # Many programs that read one small block each take less time than few that read a large one, or several.
    useful, filling = max(_PARTS, triton.cdiv(keys, most)), max(1, _PROGRAMS // (rows * kv_heads))
    parts = min(triton.cdiv(keys, _FEWEST_KEYS), useful, filling)
    block = min(most, max(16, triton.next_power_of_2(triton.cdiv(keys, parts))))
    part = triton.cdiv(triton.cdiv(keys, parts), block) * block
    parts = triton.cdiv(keys, part)
    out = torch.empty((rows, 1, heads, elements), dtype=q.dtype, device=q.device)
    size = rows * heads * parts * (columns + 2)
    target = out if parts == 1 else torch.empty(size, dtype=torch.float32, device=q.device)
    with launching(q) as early:
        _attend[(kv_heads, rows, parts)](
            q,
            k,
            v,
            q if mask is None else mask,
            q if bias is None else bias,
            target,
            scale * _LOG2E,
            keys,
            part,
            *q.stride()[:2],
            *k.stride()[:3],
            *v.stride()[:3],
            *((0, 0) if mask is None else (_stride(mask, 0), mask.stride(3))),
            *((0, 0, 0) if bias is None else (_stride(bias, 0), _stride(bias, 1), bias.stride(3))),
            MASKED=mask is not None,
            BIASED=bias is not None,
            IN_PARTS=parts > 1,
            GROUP=group,
            QUERIES=max(16, triton.next_power_of_2(group)),
            ELEMENTS=elements,
            COLUMNS=columns,
            KEYS=block,
            num_warps=4,
            num_stages=3 if block == most else 1,
            **early,
        )
        if parts > 1:
            _sum_parts[(rows * heads,)](
                target,
                out,
                parts,
                ELEMENTS=elements,
                COLUMNS=columns,
                PARTS=triton.next_power_of_2(parts),
                num_warps=4,
                **early,
            )
    return out


def _stride(tensor: Tensor, dim: int) -> int:
    return tensor.stride(dim) if tensor.shape[dim] > 1 else 0
