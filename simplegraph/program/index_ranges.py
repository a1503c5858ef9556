"""What a recorded run takes as indices: the memory that they come from, and their valid range.

An index that is out of range ends the process's use of the GPU. If every index of a graph comes from an argument that
is limited to its range before the launch, or from memory that did not change, the graph can be launched for any call.

This follows indices; for values that are read back see `steady_reads`, for CPU tensors `host_modes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.operators import INDICES, OperatorFacts, indices_of, strided_tensors
from simplegraph.base.tensors import storage_key

_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index"})  # these fault by their indices alone
_COPYING = frozenset({"clone", "_to_copy", "to", "contiguous", "reshape", "flatten"})
_MAX_SOURCES = 16  # the most storages that are remembered for an index


class IndexOrigin(NamedTuple):
    """Memory from before a run, all of whose elements are indices.

    Attributes:
        memory: its storage key.
        elements: their number; dtype: their dtype.
    """

    memory: int
    elements: int
    dtype: torch.dtype


# The origin of a tensor's values: an unchanged copy of all integers in some memory, or a computation from the storages
# with these keys (no keys: a constant).
_Origin = IndexOrigin | frozenset[int]


class IndexRanges:
    """Follows values through a run, and notes in which range they must be where they are indices.

    Args:
        made: storage keys of the memory that the run made; it grows.

    Attributes:
        ranges: for memory from before the run all of whose elements are indices, the (lowest, highest) valid one.
        sources: storage keys of memory from before the run from which other indices are computed.
        computed_sizes: the sizes of all dimensions of these, and of constants.
        may_fault: True if an operator may fail on a GPU because of a value even if all these are in range, and the
            sources unchanged.
    """

    def __init__(self, made: Collection[int]) -> None:
        self._made = made
        # Of memory that the run made, with the dtype of its own elements.
        self._origins: dict[int, tuple[_Origin | None, torch.dtype | None]] = {}
        self.ranges: dict[IndexOrigin, tuple[int, int]] = {}
        self.sources: set[int] = set()
        self.computed_sizes: set[int] = set()
        self.may_fault = False

    def note_fault(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the indices of an operator that may fault."""
        self.may_fault = self.may_fault or not self._note_indices(facts, args, kwargs)

    def _note_indices(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note an operator's indices; False if it may fault even if all of them are in range, or as they were."""
        if facts.name not in _LOOKUPS:
            return False
        if facts.name == "index" and any(index is not None and index.dtype not in INDICES for index in args[1]):
            return False  # a mask
        for values, first, size, _ in indices_of(facts.name, args, kwargs):
            origin = self._origin(values)
            if origin is None or size == 0:
                return False
            if isinstance(origin, frozenset):
                self.sources |= origin
                self.computed_sizes.update(values.shape)
            else:
                low, high = self.ranges.get(origin, (first, size - 1))
                self.ranges[origin] = max(low, first), min(high, size - 1)
        return True

    def note(self, facts: OperatorFacts, given: Sequence[Any], made: Iterable[Tensor]) -> None:
        """Note the origin of each tensor that an operator makes of these arguments."""
        tensors = strided_tensors(given)
        keys = set(map(storage_key, tensors))
        has_others = any(issubclass(type(leaf), Tensor) and leaf.layout is not torch.strided for leaf in given)
        known = [
            frozenset({origin.memory}) if isinstance(origin, IndexOrigin) else origin
            for origin in map(self._origin, tensors)
            if origin is not None
        ]
        sources: frozenset[int] | None = None
        if not (len(known) < len(tensors) or has_others or facts.is_uninitialised):
            sources = frozenset[int]().union(*known)
        if sources is not None and len(sources) > _MAX_SOURCES:
            sources = None
        for key in keys if facts.written else ():
            self._origins[key] = sources, None
        for tensor in made:
            key = storage_key(tensor)
            if key not in keys:  # no view
                whole = self._memory_copied_from(tensors, tensor) if facts.name in _COPYING else None
                self._origins[key] = whole or sources, tensor.dtype

    def _memory_copied_from(self, tensors: Sequence[Tensor], made: Tensor) -> IndexOrigin | None:
        """Return the memory all of whose integers were copied to a tensor; None if there is none."""
        if len(tensors) != 1 or made.dtype not in INDICES:
            return None
        origin = self._origin(tensors[0])
        if not isinstance(origin, IndexOrigin) or made.itemsize < tensors[0].itemsize:
            return None
        return origin if _count_elements(made) == origin.elements else None

    def _origin(self, tensor: Tensor) -> _Origin | None:
        """Return where the values in a tensor come from; None if this is not known."""
        key = storage_key(tensor)
        if key not in self._made:
            count = _count_elements(tensor) if tensor.dtype in INDICES else 0
            return IndexOrigin(key, count, tensor.dtype) if count else frozenset({key})
        origin, dtype = self._origins.get(key, (None, None))
        if isinstance(origin, IndexOrigin) and (
            origin.elements != _count_elements(tensor) or dtype is not tensor.dtype
        ):
            return frozenset({origin.memory})
        return origin


def _count_elements(tensor: Tensor) -> int:
    """Count the elements that a tensor has in contiguous memory, repeated ones once; 0 if it has gaps."""
    count = 1 if tensor.numel() else 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1 and stride:
            if stride != count:
                return 0
            count *= size
    return count
