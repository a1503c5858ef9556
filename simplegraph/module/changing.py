"""Numbers on the host that change from call to call, such as timesteps: tensors in graphs where the forward allows."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from simplegraph.nested import constant_key

logger = logging.getLogger("simplegraph")

# Different values of an argument after which it counts as one that changes: fewer may be those of a switch.
_VALUES = 3
PROVEN_VALUES = 2  # with as many of them a replay must equal eager, for each graph
_MAX_ARGUMENTS = 256
Kind = type | torch.dtype
_HELD = (torch.int64, torch.int32, torch.float64, torch.float32, torch.float16, torch.bfloat16)
_DTYPES = {int: torch.int64, float: torch.float64}  # as 0-dim tensors they promote no other tensor, as numbers do not


class ChangingNumbers:
    """Decides which numbers among a module's arguments are inputs of graphs, as 0-dim tensors, and which are keys.

    Python that needs the value cannot go on with a tensor in a capture, and proofs compare what it computes with
    what the number gives; where either fails, each value has a graph of its own again.

    Attributes:
        refused: argument name -> why it cannot be a tensor.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, Kind], set[Hashable]] = {}
        self.refused: dict[str, str] = {}

    def find(self, leaves: Sequence[Any], names: Sequence[str], device: torch.device) -> dict[int, Kind]:
        """Return which leaves of a call are inputs, by index, with their kinds, and note the values of others."""
        found = {}
        for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            kind = number_kind(leaf, device)
            if kind is None or name in self.refused:
                continue
            seen = self._seen.get((name, kind))
            if seen is None:
                seen = self._seen[name, kind] = set() if len(self._seen) < _MAX_ARGUMENTS else {None}
            if len(seen) < _VALUES and None not in seen:
                seen.add(value_key(leaf))
            if len(seen) >= _VALUES:
                found[index] = kind
        return found

    def refuse(self, module: str, names: Sequence[str], why: str) -> None:
        """Make these arguments keys again, for good."""
        self.refused |= dict.fromkeys(names, why)
        logger.info("simplegraph: %s: each value of %s has a graph of its own: %s", module, ", ".join(names), why)

    @property
    def advice(self) -> str:
        """Say which arguments change and could not be tensors; empty if there are none."""
        return "".join(f"; {name} changes, and as a tensor: {why}" for name, why in self.refused.items())


def number_kind(leaf: Any, device: torch.device) -> Kind | None:
    """Return the type of a number, or the dtype of one that a 0-dim CPU tensor holds for a call on another device."""
    if type(leaf) in _DTYPES:
        return type(leaf) if type(leaf) is float or -(2**63) <= leaf < 2**63 else None
    if type(leaf) is not torch.Tensor or leaf.dim() or not leaf.is_cpu or device.type == "cpu" or leaf.requires_grad:
        return None
    return leaf.dtype if leaf.dtype in _HELD else None


def value_key(leaf: Any) -> Hashable:
    """Return a key of a number's value."""
    return constant_key(leaf.item() if isinstance(leaf, torch.Tensor) else leaf)


def number_tensor(leaf: Any, device: torch.device) -> torch.Tensor:
    """Make a 0-dim tensor of a number, on the device without waiting for it."""
    held = isinstance(leaf, torch.Tensor)
    dtype, number = (leaf.dtype, leaf.item()) if held else (_DTYPES[type(leaf)], leaf)
    with torch.inference_mode(False):
        return torch.full((), number, dtype=dtype, device=device)


def with_tensors(
    leaves: Sequence[Any] | None, numbers: Sequence[tuple[int, Kind, torch.device]]
) -> Sequence[Any] | None:
    """Put tensors in place of a call's numbers; None if one of them is of another kind."""
    if leaves is None:
        return None
    made = list(leaves)
    for index, kind, device in numbers:
        if number_kind(made[index], device) is not kind:
            return None
        made[index] = number_tensor(made[index], device)
    return made
