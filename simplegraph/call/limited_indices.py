"""Indices of a call, limited to their valid range while it is not known if the graph serves the call at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from simplegraph.call.inputs import Slot

Tensors = list[Tensor]


class LimitedIndices:
    """The arguments that a graph takes as indices.

    A graph that is launched in vain may look up other tables than eager. So its indices are limited to its own tables;
    those of a call that it serves are then looked up in a table of the same length, so that a wrong one fails as in
    eager.

    Args:
        slots: the arguments.
        ranges: (lowest, highest) index by name; an index below 0 counts from the end.
    """

    def __init__(self, slots: Sequence[Slot], ranges: Mapping[str, tuple[int, int]]) -> None:
        copied = [slot for slot in slots if slot.shape is not None and not slot.reference]
        self._num_copied = len(copied)
        self._limits: list[tuple[int, int, int, Tensor]] = []
        for at, (name, view) in enumerate((slot.arg.name, slot.view) for slot in copied):
            if name in ranges:
                low, high = ranges[name]
                table = torch.zeros(1, dtype=torch.uint8, device=view.device).expand(high + 1, 1)
                self._limits.append((at, low, high, table[:, 0] if low < 0 else table))
        limited = {at for at, *_ in self._limits}
        self._others = [at for at in range(self._num_copied) if at not in limited]

    def are_all_copied(self, sources: Tensors) -> bool:
        """True if a call copies every argument, so that none is already in its static input."""
        return len(sources) == self._num_copied

    def load(self, sources: Tensors, targets: Tensors) -> tuple[Tensors, Tensors]:
        """Copy the indices within their range; return the other copies, which remain to be made."""
        for at, low, high, _ in self._limits:
            torch.clamp(sources[at], low, high, out=targets[at])
        return [sources[at] for at in self._others], [targets[at] for at in self._others]

    def check(self, sources: Tensors) -> None:
        """Fail as eager does, on a GPU later and for good, if an index is out of range."""
        for at, low, _, table in self._limits:
            if low < 0:
                table[sources[at]]
            else:
                torch.embedding(table, sources[at])
