"""Limit a call's indices to a graph's tables while the call is not checked yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from simplegraph.base.constants import is_written_by_graphs
from simplegraph.base.tensors import storage_key
from simplegraph.call.inputs import HostInput, InputSet, Slot
from simplegraph.program.index_ranges import IndexOrigin, IndexRanges

Tensors = list[Tensor]
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_MAX_BYTES = 1 << 20  # of buffers that a graph's indices are computed from, which are kept alive


class SafeIndices:
    """Makes the indices of an early launch valid: arguments by clamping, buffers by comparing versions.

    A call that is meant for another graph may have indices beyond this graph's tables. Before an early launch,
    arguments are limited to these tables, and buffers must be as they were in the latest checked call. If the graph
    does serve the call, `check` looks up the arguments as they were in a table of the same length, so that one that is
    out of range fails as in eager.

    Args:
        slots: the arguments.
        inputs: their static inputs; padded: the rows of the graph.
        ranges: what the graph takes as indices. One below 0 counts from the end.
        module: the module whose buffers these may be.

    Attributes:
        limits: (place among the copies, lowest, highest, a table of this length) of each argument that is an index.
        are_known: True if every index of the graph is a constant, an argument in `limits`, which has memory of its own,
            or computed from buffers.
    """

    def __init__(
        self, slots: Sequence[Slot], inputs: InputSet, padded: int, ranges: IndexRanges, module: nn.Module
    ) -> None:
        copied = [slot for slot in slots if slot.shape is not None and not slot.reference]
        self._num_copied = len(copied)
        self.limits: list[tuple[int, int, int, Tensor]] = []
        self._others: list[int] = []
        rest = ranges.ranges.copy()
        for at, slot in enumerate(copied):
            whole = inputs.inputs[slot.arg.name].view(padded)
            origin = IndexOrigin(storage_key(whole), whole.numel(), whole.dtype)
            if origin not in rest or isinstance(slot.arg, HostInput):
                self._others.append(at)
                continue
            low, high = rest.pop(origin)
            table = torch.zeros(1, dtype=torch.uint8, device=slot.view.device).expand(high + 1, 1)
            self.limits.append((at, low, high, table[:, 0] if low < 0 else table))
        sources = ranges.sources | {origin.memory for origin in rest}
        self._buffers = _buffers_in(module, sources)
        self._as_checked = self._state()
        num_bytes = {storage_key(buffer): buffer.untyped_storage().nbytes() for buffer in self._buffers}
        self.are_known = num_bytes.keys() == sources and sum(num_bytes.values()) <= _MAX_BYTES

    def _state(self) -> list[tuple[int, int]]:
        return [(buffer.data_ptr(), buffer._version) for buffer in self._buffers]

    def note_checked(self) -> None:
        """Note the state of the buffers in a checked call: the module's own tables are the graph's."""
        self._as_checked = self._state()

    def can_load(self, sources: Tensors) -> bool:
        """True if no buffer was written, and the call copies every argument: none is already in its static input."""
        if any(map(is_written_by_graphs, self._buffers)):  # replays count no writes
            return False
        return (not self.limits or len(sources) == self._num_copied) and self._state() == self._as_checked

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


def _buffers_in(module: nn.Module, keys: set[int]) -> Tensors:
    """Return an alias of each buffer and parameter in storages with these keys that counts its writes."""
    if not keys:
        return []
    held = {id(tensor): tensor for tensor in itertools.chain(module.buffers(), module.parameters())}
    counted = (tensor for tensor in held.values() if type(tensor) in _PLAIN and not tensor.is_inference())
    return [tensor.detach() for tensor in counted if tensor.layout is torch.strided and storage_key(tensor) in keys]
