"""Indices of a call, limited to their valid range until it is known that the graph serves the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from simplegraph.base.tensors import storage_key
from simplegraph.call.inputs import HostInput, InputSet, Slot
from simplegraph.program.index_ranges import IndexOrigin

Tensors = list[Tensor]


class LimitedIndices:
    """The arguments that a graph takes as indices.

    A call that is meant for another graph may have indices beyond this graph's tables. They are limited before a launch
    that comes before the comparison. If the graph does serve the call, `check` looks up the indices as they were in a
    table of the same length, so that one that is out of range fails as in eager.

    Args:
        slots: the arguments.
        inputs: their static inputs; padded: the rows of the graph.
        ranges: the (lowest, highest) index of what the graph takes as indices. One below 0 counts from the end.

    Attributes:
        limits: (place among the copies, lowest, highest, a table of this length) of each argument that is an index.
        are_complete: True if every index of the graph is an argument in `limits`: each has memory of its own.
    """

    def __init__(
        self, slots: Sequence[Slot], inputs: InputSet, padded: int, ranges: Mapping[IndexOrigin, tuple[int, int]]
    ) -> None:
        copied = [slot for slot in slots if slot.shape is not None and not slot.reference]
        self._num_copied = len(copied)
        self.limits: list[tuple[int, int, int, Tensor]] = []
        self._others: list[int] = []
        for at, slot in enumerate(copied):
            whole = inputs.inputs[slot.arg.name].view(padded)
            limit = ranges.get(IndexOrigin(storage_key(whole), whole.numel(), whole.dtype))
            if limit is None or isinstance(slot.arg, HostInput):
                self._others.append(at)
                continue
            low, high = limit
            table = torch.zeros(1, dtype=torch.uint8, device=slot.view.device).expand(high + 1, 1)
            self.limits.append((at, low, high, table[:, 0] if low < 0 else table))
        self.are_complete = len(self.limits) == len(ranges)

    def are_all_copied(self, sources: Tensors) -> bool:
        """True if a call copies every argument, so that none is already in its static input."""
        return len(sources) == self._num_copied

    def load(self, sources: Tensors, targets: Tensors) -> tuple[Tensors, Tensors]:
        """Copy the indices within their range; return the other copies, which remain to be made."""
        for at, low, high, _ in self.limits:
            torch.clamp(sources[at], low, high, out=targets[at])
        return [sources[at] for at in self._others], [targets[at] for at in self._others]

    def check(self, sources: Tensors) -> None:
        """Fail as eager does if an index is out of range: on a GPU by an assertion, which a later call reports."""
        for at, low, _, table in self.limits:
            if low < 0:
                table[sources[at]]
            else:
                torch.embedding(table, sources[at])
