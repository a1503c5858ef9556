"""The shape and the weights of a Mamba2 layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

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
