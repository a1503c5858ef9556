"""Triton kernels of Mamba2: the convolution, and the recurrence of each head. Any batch, one launch each.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.recurrent.mamba2_layer import Mamba2Shape, Mamba2Weights


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    x_row,
    out_row,
    slots_row,
    state_row,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mix each token of a request with those before it, `BLOCK` channels in each program."""
    request = tl.program_id(0)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if end <= start:  # padding
        return
    slot = tl.load(slots_ptr + request * slots_row).to(tl.int64)
    goes_on = tl.load(lengths_ptr + request) > end - start
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = channel < CHANNELS
    state = state_ptr + slot * state_row + channel
    for first in range(start, end, TOKENS):
        token = (first + tl.arange(0, TOKENS))[:, None]
        total = tl.zeros((TOKENS, BLOCK), tl.float32)
        for tap in tl.static_range(WIDTH):
            source = token - (WIDTH - 1) + tap
            here = inside & (source >= start) & (token < end)
            earlier = inside & (source < start) & goes_on
            values = tl.load(x_ptr + tl.cast(source, tl.int64) * x_row + channel, here, 0.0).to(tl.float32)
            values += tl.load(state + (WIDTH - 1 + source - start) * CHANNELS, earlier, 0.0).to(tl.float32)
            total += values * tl.load(weight_ptr + channel * WIDTH + tap, inside, 0.0).to(tl.float32)
        if BIASED:
            total += tl.load(bias_ptr + channel, inside, 0.0).to(tl.float32)
        total = total / (1.0 + tl.exp(-total))
        tl.store(out_ptr + tl.cast(token, tl.int64) * out_row + channel, total, inside & (token < end))
    if slot == 0:  # a dummy step
        return
    place = tl.arange(0, PLACES)[:, None]
    source = end - (WIDTH - 1) + place
    kept = inside & (place < WIDTH - 1)
    here, earlier = kept & (source >= start), kept & (source < start) & goes_on
    recent = tl.load(x_ptr + tl.cast(source, tl.int64) * x_row + channel, here, 0.0)
    recent += tl.load(state + (WIDTH - 1 + source - start) * CHANNELS, earlier, 0.0)
    tl.debug_barrier()  # a place is read by another thread than the one that writes it
    tl.store(state + place * CHANNELS, recent, kept)


@triton.jit  # type: ignore[untyped-decorator]
def _scan_heads(  # type: ignore[no-untyped-def]
    x_ptr,
    dt_ptr,
    out_ptr,
    a_ptr,
    d_ptr,
    dt_bias_ptr,
    state_ptr,
    slots_ptr,
    starts_ptr,
    lengths_ptr,
    x_row,
    dt_row,
    out_row,
    slots_row,
    state_row,
    least,
    most,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    STATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Advance some rows of a head's state by all tokens of a request, in each program."""
    request, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts_ptr + request), tl.load(starts_ptr + request + 1)
    if end <= start:  # padding
        return
    slot = tl.load(slots_ptr + request * slots_row).to(tl.int64)
    goes_on = tl.load(lengths_ptr + request) > end - start
    row, column = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    rows, columns = row < HEAD_DIM, column < STATE
    place = (head * HEAD_DIM + row)[:, None] * STATE + column[None, :]
    inside = rows[:, None] & columns[None, :]
    state = tl.load(state_ptr + slot * state_row + place, inside & goes_on, 0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_ptr + head).to(tl.float32))
    skip, bias = tl.load(d_ptr + head).to(tl.float32), tl.load(dt_bias_ptr + head).to(tl.float32)
    shared = HEADS * HEAD_DIM + (head // (HEADS // GROUPS)) * STATE + column
    for token in range(start, end):
        inputs = x_ptr + tl.cast(token, tl.int64) * x_row
        x = tl.load(inputs + head * HEAD_DIM + row, rows, 0.0).to(tl.float32)
        b = tl.load(inputs + shared, columns, 0.0).to(tl.float32)
        c = tl.load(inputs + shared + GROUPS * STATE, columns, 0.0).to(tl.float32)
        raw = tl.load(dt_ptr + tl.cast(token, tl.int64) * dt_row + head).to(tl.float32) + bias
        # softplus; log(1 + e) loses a small e, which the quotient puts back (Goldberg 1991, theorem 4).
        e = tl.exp(tl.minimum(raw, 20.0))
        one = 1.0 + e
        small = tl.where(one == 1.0, e, tl.log(one) * e / tl.where(one == 1.0, 1.0, one - 1.0))
        step = tl.minimum(tl.maximum(tl.where(raw > 20.0, raw, small), least), most)
        state = state * tl.exp(step * rate) + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * x
        tl.store(out_ptr + tl.cast(token, tl.int64) * out_row + head * HEAD_DIM + row, y, rows)
    if slot == 0:  # a dummy step
        return
    tl.store(state_ptr + slot * state_row + place, state, inside)


def convolve(xbc: Tensor, weights: Mamba2Weights, state: Tensor, metadata: CommonMetadata, *, single: bool) -> Tensor:
    """Convolve each request's inputs with its earlier ones, apply SiLU, and keep the last ones as its state.

    Args:
        xbc: (T, channels), contiguous columns.
        weights: of the layer.
        state: (num_slots + 1, conv_width - 1, channels), contiguous; written.
        metadata: the step, whose block table holds state slots.
        single: True if no request has more than one token.

    Returns:
        (T, channels) in the dtype of xbc; padding rows are undefined.
    """
    channels, width = weights.conv_weight.shape
    out = torch.empty(xbc.shape, dtype=xbc.dtype, device=xbc.device)
    block = 256 if single else 64
    bias = weights.conv_weight if weights.conv_bias is None else weights.conv_bias
    with torch.cuda.device_of(xbc):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _convolve[(metadata.num_reqs, triton.cdiv(channels, block))](
            *(xbc, out, weights.conv_weight, bias, state),
            *(metadata.block_table, metadata.query_start_loc, metadata.seq_lens),
            *(xbc.stride(0), out.stride(0), metadata.block_table.stride(0), state.stride(0)),
            CHANNELS=channels,
            WIDTH=width,
            BIASED=weights.conv_bias is not None,
            TOKENS=1 if single else 16,
            PLACES=triton.next_power_of_2(width - 1),
            BLOCK=block,
        )
    return out


def scan_heads(
    mixed: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    state: Tensor,
    metadata: CommonMetadata,
    out: Tensor,
) -> None:
    """Run the recurrence of every head over each request's tokens.

    Args:
        mixed: (T, channels), x, B and C after the convolution.
        dt: (T, num_heads), before its bias.
        weights: of the layer.
        shape: of the layer.
        state: (num_slots + 1, num_heads, head_dim, state_size), contiguous; written.
        metadata: the step, whose block table holds state slots.
        out: (T, num_heads * head_dim), contiguous columns; written but for padding rows.
    """
    rows = min(16, triton.next_power_of_2(shape.head_dim))
    grid = (metadata.num_reqs, shape.num_heads, triton.cdiv(shape.head_dim, rows))
    with torch.cuda.device_of(mixed):  # type: ignore[no-untyped-call]
        _scan_heads[grid](
            *(mixed, dt, out, weights.A_log, weights.D, weights.dt_bias, state),
            *(metadata.block_table, metadata.query_start_loc, metadata.seq_lens),
            *(mixed.stride(0), dt.stride(0), out.stride(0), metadata.block_table.stride(0), state.stride(0)),
            *shape.dt_limit,
            HEADS=shape.num_heads,
            HEAD_DIM=shape.head_dim,
            GROUPS=shape.num_groups,
            STATE=shape.state_size,
            ROWS=rows,
            COLUMNS=triton.next_power_of_2(shape.state_size),
        )
