"""The arguments that a recorded run takes as indices, and their valid range.

An index that is out of range ends the process's use of the GPU. If every index of a graph is a constant, or a value of
an argument that is limited to its range before the launch, the graph can be launched whatever its arguments are.
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


class IndexOrigin(NamedTuple):
    """Memory from before a run, all of whose elements are indices.

    Attributes:
        memory: its storage key; 0 for constants.
        elements: their number; dtype: their dtype.
    """

    memory: int
    elements: int
    dtype: torch.dtype


_CONSTANT = IndexOrigin(0, 0, torch.int64)


class IndexRanges:
    """Follows integers through a run, and notes in which range they must be where they are indices.

    Args:
        made: storage keys of the memory that the run made; it grows.

    Attributes:
        ranges: for each argument all of whose elements are indices, the (lowest, highest) valid one.
        may_fault: True if an operator may fail on a GPU because of a value even if all these are in range.
    """

    def __init__(self, made: Collection[int]) -> None:
        self._made = made
        # Of memory that the run made, with the dtype of its own elements.
        self._origins: dict[int, tuple[IndexOrigin, torch.dtype]] = {}
        self.ranges: dict[IndexOrigin, tuple[int, int]] = {}
        self.may_fault = False

    def note_fault(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the indices of an operator that may fault."""
        self.may_fault = self.may_fault or not self._note_indices(facts, args, kwargs)

    def _note_indices(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Note an operator's indices; False if it may fault even if all of them are in range."""
        if facts.name not in _LOOKUPS:
            return False
        if facts.name == "index" and any(index is not None and index.dtype not in INDICES for index in args[1]):
            return False  # a mask
        for values, first, size, _ in indices_of(facts.name, args, kwargs):
            origin = self._origin(values)
            if origin is None or size == 0:
                return False
            if origin is not _CONSTANT:
                low, high = self.ranges.get(origin, (first, size - 1))
                self.ranges[origin] = max(low, first), min(high, size - 1)
        return True

    def note(self, facts: OperatorFacts, given: Sequence[Any], made: Iterable[Tensor]) -> None:
        """Note the origin of each tensor of integers that an operator makes of these arguments."""
        tensors = strided_tensors(given)
        keys = set(map(storage_key, tensors))
        for key in keys if facts.written else ():
            self._origins.pop(key, None)
        for tensor in made:
            if (key := storage_key(tensor)) in keys:  # a view
                continue
            self._origins.pop(key, None)  # of freed memory
            if tensor.dtype in INDICES:
                origin = self._common_origin(facts, given, tensors, tensor)
                if origin is not None:
                    self._origins[key] = origin, tensor.dtype

    def _common_origin(
        self, facts: OperatorFacts, given: Sequence[Any], tensors: Sequence[Tensor], made: Tensor
    ) -> IndexOrigin | None:
        """Return the origin of all values of a tensor that an operator made; None if there is not one."""
        if facts.is_uninitialised or any(
            issubclass(type(leaf), Tensor) and leaf.layout is not torch.strided for leaf in given
        ):
            return None
        origins = set(map(self._origin, tensors))
        if origins <= {_CONSTANT}:
            return _CONSTANT
        if facts.name not in _COPYING or len(tensors) != 1 or made.itemsize < tensors[0].itemsize:
            return None
        (origin,) = origins
        return origin if origin is not None and _count_elements(made) == origin.elements else None

    def _origin(self, tensor: Tensor) -> IndexOrigin | None:
        """Return the memory of which a tensor has every element, or `_CONSTANT`; None if it has others or fewer."""
        if tensor.dtype not in INDICES:
            return None
        key, count = storage_key(tensor), _count_elements(tensor)
        if key not in self._made:
            return IndexOrigin(key, count, tensor.dtype) if count else None
        origin, dtype = self._origins.get(key, (None, None))
        if origin is None or origin is _CONSTANT:
            return origin
        return origin if origin.elements == count and dtype is tensor.dtype else None


def _count_elements(tensor: Tensor) -> int:
    """Count the elements that a tensor has in contiguous memory, repeated ones once; 0 if it has gaps."""
    count = 1 if tensor.numel() else 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size > 1 and stride:
            if stride != count:
                return 0
            count *= size
    return count
