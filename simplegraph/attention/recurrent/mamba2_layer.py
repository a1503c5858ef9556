"""The shape and the weights of a Mamba2 layer, and its steps by torch's operators, with which kernels are compared."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.recurrent.states import StateShape


class Mamba2Shape(NamedTuple):
    """The shape of a Mamba2 layer.

    Attributes:
        num_heads, head_dim: of the recurrence.
        num_groups: heads are divided evenly into these; those of a group share B and C.
        state_size: columns of each head's state.
        conv_width: tokens that the convolution sees, its own included.
        dt_limit: bounds of the time step.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_width: int = 4
    dt_limit: tuple[float, float] = (0.0, math.inf)

    @property
    def channels(self) -> int:
        """Columns of x, B and C together, which the convolution mixes with earlier tokens."""
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    def states(self, dtype: torch.dtype, scan_dtype: torch.dtype = torch.float32) -> dict[str, StateShape]:
        """Return the states of one request, for `StateCache`: earlier inputs in `dtype`, and the heads' matrices."""
        scan = (self.num_heads, self.head_dim, self.state_size)
        return {"conv": StateShape((self.conv_width - 1, self.channels), dtype), "scan": StateShape(scan, scan_dtype)}


class Mamba2Weights(NamedTuple):
    """The weights of one layer's recurrence, of any floating dtype.

    Attributes:
        conv_weight: (channels, conv_width), contiguous; conv_bias: (channels,) or None.
        A_log, D, dt_bias: (num_heads,).
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    D: Tensor
    dt_bias: Tensor


def scan_tokens(
    xbc: Tensor,
    dt: Tensor,
    weights: Mamba2Weights,
    shape: Mamba2Shape,
    conv: Tensor,
    scan: Tensor,
    metadata: CommonMetadata,
    longest: int,
    out: Tensor,
) -> None:
    """Advance all requests of a step together, one token after the other: graph-safe, not fast.

    No shape depends on a length.

    Args:
        xbc: (T, channels), x, B and C before the convolution.
        dt: (T, num_heads), before its bias.
        weights: of the layer.
        shape: of the layer.
        conv: the layer's states, (num_slots + 1, conv_width - 1, channels); written.
        scan: the layer's states, (num_slots + 1, num_heads, head_dim, state_size); written.
        metadata: the step, whose block table holds state slots.
        longest: tokens of a request, at most.
        out: (T, num_heads * head_dim); written but for padding rows.
    """
    starts = metadata.query_start_loc[:-1].long()
    counts = metadata.query_start_loc[1:] - starts
    slots = metadata.block_table[:, 0].long()
    begins = metadata.seq_lens == counts
    before = _unless(begins, conv.index_select(0, slots))
    state = _unless(begins, scan.index_select(0, slots)).float()
    outputs = []
    for number in range(longest):
        # Requests with fewer tokens compute something of no meaning here, which is dropped.
        rows, active = (starts + number).clamp(max=len(xbc) - 1), number < counts
        seen = torch.cat((before, xbc.index_select(0, rows)[:, None]), dim=1)
        y, advanced = _advance(seen, dt.index_select(0, rows), weights, shape, state)
        outputs.append(y)
        before = _unless(~active, seen[:, 1:], before)
        state = _unless(~active, advanced, state)
    _write(conv, slots, before)
    _write(scan, slots, state)
    token = torch.arange(len(xbc), device=xbc.device)
    request = torch.searchsorted(metadata.query_start_loc[1:], token, right=True).clamp(max=len(starts) - 1)
    place = (token - starts[request]).clamp(0, longest - 1)
    real = token < metadata.query_start_loc[-1]
    out.copy_(_unless(~real, torch.stack(outputs)[place, request].to(out.dtype), out))


def _advance(
    seen: Tensor, dt: Tensor, weights: Mamba2Weights, shape: Mamba2Shape, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token of each request: outputs, (R, num_heads * head_dim), and new states, both float32.

    Args:
        seen: (R, conv_width, channels), inputs of the last tokens.
        dt: (R, num_heads).
        weights: of the layer.
        shape: of the layer.
        state: (R, num_heads, head_dim, state_size) float32.
    """
    mixed = (seen.float() * weights.conv_weight.float().t()).sum(dim=1)
    if weights.conv_bias is not None:
        mixed = mixed + weights.conv_bias.float()
    mixed = F.silu(mixed).to(seen.dtype).float()
    columns = shape.num_groups * shape.state_size
    x, b, c = torch.split(mixed, [shape.num_heads * shape.head_dim, columns, columns], dim=1)
    rows = len(seen)
    x = x.reshape(rows, shape.num_heads, shape.head_dim)
    share = shape.num_heads // shape.num_groups
    b, c = (part.reshape(rows, shape.num_groups, -1).repeat_interleave(share, dim=1) for part in (b, c))
    step = F.softplus(dt.float() + weights.dt_bias.float()).clamp(*shape.dt_limit)
    decay = torch.exp(-step * weights.A_log.float().exp())
    state = state * decay[..., None, None] + (step[..., None] * x)[..., None] * b[:, :, None]
    y = (state * c[:, :, None]).sum(dim=-1) + weights.D.float()[:, None] * x
    return y.flatten(1), state


def _unless(dropped: Tensor, rows: Tensor, other: Tensor | None = None) -> Tensor:
    """Replace the rows that are `dropped`, (n,) bool, by those of `other` or by zeros, even where they are NaN."""
    dropped = dropped.view(-1, *[1] * (rows.dim() - 1))
    return rows.masked_fill(dropped, 0) if other is None else torch.where(dropped, other, rows)


def _write(states: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write each request's state to its slot; slot 0 keeps its own, which all padding requests write."""
    states.index_copy_(0, slots, _unless(slots == 0, rows.to(states.dtype), states[:1]))
