"""Triton kernel of a layer norm whose scale and shift depend on the image, with a gated sum before it.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching
from simplegraph.fused.torch_operators import Adapted

_TILE = 1024  # elements of several short rows in one program


# The number of tokens is an argument, so that one variant serves images of any size.
@triton.jit(do_not_specialize=["tokens", "rows"])  # type: ignore[untyped-decorator]
def _adapt(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    row_ptr,
    gate_ptr,
    residual_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    total_ptr,
    tokens,
    rows,
    gate_row,
    scale_row,
    shift_row,
    eps,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
    ROW: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    SCALED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Normalize some rows in each program, in float32 from the rounded sum on."""
    await_others(EARLY)
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (column < COLUMNS) & (index < rows)
    image, place, known = index // tokens, index * COLUMNS + column, column < COLUMNS
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    if ROW:
        x += tl.load(row_ptr + column, known, 0.0).to(tl.float32)
    if GATED:
        x *= tl.load(gate_ptr + image * gate_row + column, inside, 0.0).to(tl.float32)
    if ADDED:
        x += tl.load(residual_ptr + place, inside, 0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + place, total, inside)
        x = total.to(tl.float32)
    x = tl.where(inside, x - tl.sum(x, 1)[:, None] * (1.0 / COLUMNS), 0.0)
    variance = tl.sum(x * x, 1)[:, None] * (1.0 / COLUMNS)
    x = x * tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    if WEIGHTED:
        x *= tl.load(weight_ptr + column, known, 0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias_ptr + column, known, 0.0).to(tl.float32)
    if SCALED:
        x *= 1.0 + tl.load(scale_ptr + image * scale_row + column, inside, 0.0).to(tl.float32)
        x += tl.load(shift_ptr + image * shift_row + column, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), inside)


def adapt(x: Tensor, norm: Adapted) -> tuple[Tensor, Tensor]:
    """Compute `Operators.adapt`.

    Args:
        x: (images, tokens, columns); float32, bfloat16 or float16.
        norm: its tensors have the dtype of `x`.
    """
    x = x.contiguous()
    images, tokens, columns = x.shape
    out = torch.empty_like(x)
    total = x if norm.residual is None else torch.empty_like(x)
    gate, scale, shift = (
        each if each is None or each.stride(1) == 1 else each.contiguous()
        for each in (norm.gate, norm.scale, norm.shift)
    )
    block, rows = triton.next_power_of_2(columns), images * tokens
    together = max(1, _TILE // block)
    with launching(x) as early:
        _adapt[(triton.cdiv(rows, together),)](
            x,
            *(x if each is None else each.contiguous() for each in (norm.weight, norm.bias, norm.row)),
            x if gate is None else gate,
            x if norm.residual is None else norm.residual.contiguous(),
            *(x if each is None else each for each in (scale, shift)),
            *(out, total, tokens, rows),
            *(0 if each is None else each.stride(0) for each in (gate, scale, shift)),
            norm.eps,
            WEIGHTED=norm.weight is not None,
            BIASED=norm.bias is not None,
            ROW=norm.row is not None,
            GATED=gate is not None,
            ADDED=norm.residual is not None,
            SCALED=scale is not None,
            COLUMNS=columns,
            ROWS=together,
            BLOCK=block,
            num_warps=min(16, max(1, together * block // 256)),
            **early,
        )
    return out, total
