"""The device memory that graphs take, measured on a trial of their capture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that capturing everything takes: the largest graph, and what each further one adds.

    Attributes:
        graphs: how many there are.
        first_bytes: device memory of the largest graph and of what all share.
        next_bytes: what a further one adds, on average.
        emulated: True if the graphs were imitated: then it is the memory of their tensors, without what a driver needs.
    """

    graphs: int
    first_bytes: int
    next_bytes: int
    emulated: bool = False

    @classmethod
    def measured(cls, taken: Sequence[int], total: int, *, emulated: bool) -> MemoryEstimate:
        """Share out the memory that a capture took.

        Args:
            taken: bytes of each graph, the largest first.
            total: bytes of all, with what libraries keep for a stream that they run on first.
            emulated: True if the graphs are imitated.
        """
        further = sum(taken[1:])
        first = max(total, sum(taken)) - further
        return cls(len(taken), first, round(further / max(1, len(taken) - 1)), emulated)

    @property
    def bytes(self) -> int:
        return self.first_bytes + max(0, self.graphs - 1) * self.next_bytes

    def __str__(self) -> str:
        emulated = " (emulated: tensors only)" if self.emulated else ""
        return f"memory of {self.graphs} graphs: about {self.bytes / 2**20:.1f} MiB{emulated}"
