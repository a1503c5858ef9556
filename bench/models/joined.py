"""Projections that stand side by side in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Joined(nn.Module):
    """Several projections of one input as one, over the very memory of their weights.

    The parts stay parameters under their checkpoint names; `join` lays them side by side.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self._parts = parts  # a tuple: not registered, they belong to the parent
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def join(self) -> None:
        """Give the parts one memory, with their values; call after they were made or moved."""
        self.weight = _join([part.weight for part in self._parts])
        self.bias = None if self._parts[0].bias is None else _join([part.bias for part in self._parts])

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters' values in one tensor, of which they become parts."""
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + parameter.shape[0]]
        start += parameter.shape[0]
    return joined
