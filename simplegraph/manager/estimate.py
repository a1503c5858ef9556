"""An estimate of the device memory that graphs would take, from a few of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from simplegraph.base.config import CudaGraphMode
from simplegraph.batch.descriptor import BatchDescriptor

GraphKind = tuple[CudaGraphMode, BatchDescriptor]
# Of each mode and kind of batch. Free memory changes in steps of 2 MiB, which more graphs share.
_SAMPLES = 12


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that capturing everything would take: the largest graph, and what each further one adds.

    Attributes:
        graphs: how many there would be.
        first_bytes: device memory of the largest graph and of what all share.
        next_bytes: what a further one adds, on average.
        emulated: True if the graphs were imitated: then it is the memory of their tensors, without what a driver needs.
    """

    graphs: int
    first_bytes: int
    next_bytes: int
    emulated: bool = False

    @property
    def bytes(self) -> int:
        return self.first_bytes + max(0, self.graphs - 1) * self.next_bytes

    def __str__(self) -> str:
        emulated = " (emulated: tensors only)" if self.emulated else ""
        return f"memory of {self.graphs} graphs: about {self.bytes / 2**20:.1f} MiB{emulated}"


def graphs_to_measure(graphs: Sequence[GraphKind]) -> list[GraphKind]:
    """Pick the two largest graphs of each kind, the smallest, and some evenly between.

    Args:
        graphs: all that would be captured, largest first.
    """
    picked: set[GraphKind] = set()
    for group in _groups(graphs).values():
        last = len(group) - 1
        steps = min(last, _SAMPLES - 1)
        rest = [1 + round(step * (last - 1) / max(1, steps - 1)) for step in range(steps)]
        picked.update(group[index] for index in (0, *rest))
    return [graph for graph in graphs if graph in picked]


def estimated(
    graphs: Sequence[GraphKind], measured: Mapping[GraphKind, int], total: int, *, emulated: bool
) -> MemoryEstimate:
    """Estimate the memory of all graphs from some.

    Args:
        graphs: all of them, largest first.
        measured: bytes that each of `graphs_to_measure` took.
        total: bytes that capturing those took together, with what libraries keep for a stream that they run on first.
        emulated: True if the graphs are imitated.
    """
    if not graphs:
        return MemoryEstimate(0, 0, 0, emulated)
    shared = max(0, total - sum(measured.values()))
    rest = sum(itertools.chain(*(_interpolated(group, measured, graphs[0]) for group in _groups(graphs).values())))
    further = len(graphs) - 1
    return MemoryEstimate(len(graphs), shared + measured[graphs[0]], round(rest / further) if further else 0, emulated)


def _groups(graphs: Sequence[GraphKind]) -> dict[tuple[object, ...], list[GraphKind]]:
    """Group graphs whose memory follows their size in one way."""
    groups: dict[tuple[object, ...], list[GraphKind]] = {}
    for mode, descriptor in graphs:
        kind = mode, descriptor.uniform_query_len, descriptor.num_active_loras
        groups.setdefault(kind, []).append((mode, descriptor))
    return groups


def _interpolated(group: Sequence[GraphKind], measured: Mapping[GraphKind, int], first: GraphKind) -> Iterator[float]:
    """Yield the bytes of each graph of a group but the very first, which also takes what all of them share."""
    known = sorted((graph[1].num_tokens, measured[graph]) for graph in group if graph in measured and graph != first)
    for graph in group:
        size = graph[1].num_tokens
        below = max((entry for entry in known if entry[0] <= size), default=known[0] if known else None)
        above = min((entry for entry in known if entry[0] >= size), default=below)
        if graph != first and below is not None and above is not None:
            part = (size - below[0]) / max(1, above[0] - below[0])
            yield below[1] + part * (above[1] - below[1])
