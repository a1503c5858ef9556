"""Triton kernels over rows: a norm with a residual or a gate, one scaled and shifted by image, and a gated activation.

Imported only if Triton is installed. Nothing is specialized for the number of rows: there is one variant for each dtype
and shape of a model, so that no capture has to compile one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching, times_active
from simplegraph.fused.torch_operators import Adapted

MAX_COLUMNS = 16384  # the most that one program can hold
_GATE_BLOCK = 1024
_TILE = 1024  # elements of several short rows in one program


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    gate_row,
    eps,
    OFFSET: tl.constexpr,
    ADDED: tl.constexpr,
    GATED: tl.constexpr,
    CENTERED: tl.constexpr,
    BIASED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add a residual, or gate, and normalize a row in each program, in float32 from the rounded sum on."""
    await_others(EARLY)
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(x_ptr + start + column, inside, 0.0).to(tl.float32)
    if ADDED:
        x += tl.load(residual_ptr + start + column, inside, 0.0).to(tl.float32)
        total = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + start + column, total, inside)
        x = total.to(tl.float32)
    if GATED:
        gate = tl.load(gate_ptr + tl.program_id(0).to(tl.int64) * gate_row + column, inside, 0.0).to(tl.float32)
        x = x * (gate * tl.sigmoid(gate))
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, 0) * (1.0 / COLUMNS), 0.0)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32) + OFFSET
    variance = tl.sum(x * x, 0) * (1.0 / COLUMNS)
    x = x * tl.div_rn(1.0, tl.sqrt_rn(variance + eps)) * weight
    if BIASED:
        x += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + start + column, x.to(out_ptr.dtype.element_ty), inside)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    centered: bool = False,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute an RMS norm, or a layer norm if `centered`, of a sum or a gated product over the last dimension.

    Args:
        x: (..., columns), at most `MAX_COLUMNS`; float32, bfloat16 or float16.
        residual: added to `x`, of its shape and dtype; None for nothing.
        weight: (columns,), the dtype of `x`.
        bias: as `weight`; None for nothing.
        eps: added to the variance.
        offset: added to the weights.
        centered: True subtracts the mean.
        gate: of the shape and dtype of `x`, its rows without gaps: `x` is multiplied by its SiLU; None for no gate.

    Returns:
        The norm, and the sum: `x` itself without a residual.
    """
    x, weight = x.contiguous(), weight.contiguous()
    gates = x if gate is None else gate.reshape(-1, gate.shape[-1])
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    columns = x.shape[-1]
    block = triton.next_power_of_2(columns)
    with launching(x) as early:
        _norm[(x.numel() // columns,)](
            x,
            x if residual is None else residual.contiguous(),
            gates,
            weight,
            weight if bias is None else bias.contiguous(),
            out,
            total,
            columns if gate is None else gates.stride(0),
            eps,
            OFFSET=offset,
            ADDED=residual is not None,
            GATED=gate is not None,
            CENTERED=centered,
            BIASED=bias is not None,
            COLUMNS=columns,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
            **early,
        )
    return out, total


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_row,
    up_row,
    columns,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply the activation of a gate by a factor, for a part of a row in each program; rounded once."""
    await_others(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_row + column, inside, 0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row + column, inside, 0.0).to(tl.float32)
    product = times_active(up, gate, KIND)
    tl.store(out_ptr + row * columns + column, product.to(out_ptr.dtype.element_ty), inside)


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Compute ``activation(gate) * up``, in float32 and rounded once.

    Args:
        gate: (..., columns); float32, bfloat16 or float16.
        up: as `gate`, of the same shape and dtype.
        kind: "silu", "gelu" or "gelu_tanh".
    """
    columns = gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = (part.reshape(-1, columns) for part in (gate, up))
    gates, ups = (part if part.stride(1) == 1 else part.contiguous() for part in (gates, ups))
    rows = len(gates)
    with launching(gate) as early:
        _gate[(rows, triton.cdiv(columns, _GATE_BLOCK))](
            gates,
            ups,
            out,
            *(part.stride(0) if rows > 1 else columns for part in (gates, ups)),
            columns,
            KIND=kind,
            BLOCK=_GATE_BLOCK,
            num_warps=4,
            **early,
        )
    return out


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
    image, place, is_column = index // tokens, index * COLUMNS + column, column < COLUMNS
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    if ROW:
        x += tl.load(row_ptr + column, is_column, 0.0).to(tl.float32)
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
        x *= tl.load(weight_ptr + column, is_column, 0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias_ptr + column, is_column, 0.0).to(tl.float32)
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
        tensor if tensor is None or tensor.stride(1) == 1 else tensor.contiguous()
        for tensor in (norm.gate, norm.scale, norm.shift)
    )
    block, rows = triton.next_power_of_2(columns), images * tokens
    together = max(1, _TILE // block)
    with launching(x) as early:
        _adapt[(triton.cdiv(rows, together),)](
            x,
            *(x if tensor is None else tensor.contiguous() for tensor in (norm.weight, norm.bias, norm.row)),
            x if gate is None else gate,
            x if norm.residual is None else norm.residual.contiguous(),
            *(x if tensor is None else tensor for tensor in (scale, shift)),
            *(out, total, tokens, rows),
            *(0 if tensor is None else tensor.stride(0) for tensor in (gate, scale, shift)),
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
