"""Projections whose weights are adjacent in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Joined(nn.Module):
    """Runs several projections of one input as one, over the memory of their weights.

    The parts stay parameters under their checkpoint names; `join` lays them side by side.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self._parts = parts  # in a tuple, so that they stay submodules of the parent only
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.register_buffer("bias", None, persistent=False)

    def join(self) -> None:
        """Move the parts' values to one tensor; call after they were made or moved."""
        self.weight = _join([part.weight for part in self._parts])
        self.bias = None if self._parts[0].bias is None else _join([part.bias for part in self._parts])

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


def _join(parameters: list[nn.Parameter]) -> Tensor:
    """Concatenate the parameters' values to one tensor, and make the parameters views of it."""
    joined = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, joined.split(list(map(len, parameters))), strict=True):
        parameter.data = part
    return joined
