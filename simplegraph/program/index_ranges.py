"""The arguments that a recorded run takes as indices, and their valid range.

An index that is out of range ends the process's use of the GPU. If every index of a graph is a constant, or a value of
an argument that is limited to its range before the launch, the graph can be launched whatever its arguments are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.operators import INDICES, OperatorFacts, indices_of, strided_tensors
from simplegraph.base.tensors import storage_key

_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index"})  # these fault by their indices alone
_COPYING = frozenset({"clone", "_to_copy", "to", "contiguous", "reshape", "flatten", "repeat"})
_CONSTANT = 0  # in place of a storage key


class IndexRanges:
    """Follows integers through a recording, and notes in which range they must be where they are indices.

    Args:
        made: storage keys of the memory that the run made; it grows.

    Attributes:
        ranges: storage key -> (lowest, highest) valid value, of memory from before the run whose values are indices.
        may_fault: True if an operator may fail on a GPU because of a value even if all these are in range.
    """

    def __init__(self, made: Collection[int]) -> None:
        self._made = made
        # For memory that the run made: the memory from before the run of which its values are copies, or `_CONSTANT`.
        self._origins: dict[int, int] = {}
        self.ranges: dict[int, tuple[int, int]] = {}
        self.may_fault = False

    def note_fault(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the indices of an operator that may fault."""
        self.may_fault = self.may_fault or not self._limits(facts, args, kwargs)

    def _limits(self, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if the operator cannot fault once its indices, which this notes, are in range."""
        if facts.name not in _LOOKUPS:
            return False
        if facts.name == "index" and any(index is not None and index.dtype not in INDICES for index in args[1]):
            return False  # a mask
        for values, first, size, _ in indices_of(facts.name, args, kwargs):
            origin = self._origin(values)
            if origin is None or size == 0:
                return False
            if origin != _CONSTANT:
                low, high = self.ranges.get(origin, (first, size - 1))
                self.ranges[origin] = max(low, first), min(high, size - 1)
        return True

    def note(self, facts: OperatorFacts, given: Sequence[Any], made: Iterable[Tensor]) -> None:
        """Note where the integers come from that an operator makes of these arguments."""
        tensors = strided_tensors(given)
        keys = set(map(storage_key, tensors))
        for key in keys if facts.written else ():
            self._origins.pop(key, None)
        for tensor in made:
            if (key := storage_key(tensor)) in keys:  # a view
                continue
            self._origins.pop(key, None)  # of freed memory
            if tensor.dtype in INDICES:
                origin = self._common_origin(facts, given, tensors, tensor.itemsize)
                if origin is not None:
                    self._origins[key] = origin

    def _common_origin(
        self, facts: OperatorFacts, given: Sequence[Any], tensors: Sequence[Tensor], itemsize: int
    ) -> int | None:
        if any(issubclass(type(leaf), Tensor) and leaf.layout is not torch.strided for leaf in given):
            return None
        origins = set(map(self._origin, tensors))
        if origins <= {_CONSTANT}:
            return _CONSTANT
        if facts.name in _COPYING and len(tensors) == 1 and itemsize >= tensors[0].itemsize:
            return origins.pop()
        return None

    def _origin(self, tensor: Tensor) -> int | None:
        if tensor.dtype not in INDICES:
            return None
        key = storage_key(tensor)
        return self._origins.get(key) if key in self._made else key
