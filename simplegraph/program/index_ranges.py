"""The arguments that a recorded run takes as indices, and their valid range.

An index that is out of range ends the process's use of the GPU. If every index of a graph is a constant, or a value of
an argument that is limited to its range before the launch, the graph can be launched whatever its arguments are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.operators import OperatorFacts, strided_tensors
from simplegraph.base.tensors import storage_key
from simplegraph.program.index_checks import INDICES, indices_of

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
        keys, origins = set(map(storage_key, tensors)), set(map(self._origin, tensors))
        has_others = any(issubclass(type(leaf), Tensor) and leaf.layout is not torch.strided for leaf in given)
        if facts.written:
            for key in keys:
                self._origins.pop(key, None)
        for tensor in made:
            key = storage_key(tensor)
            if key in keys:  # a view
                continue
            self._origins.pop(key, None)  # of freed memory
            if tensor.dtype not in INDICES or has_others:
                continue
            if origins <= {_CONSTANT}:
                self._origins[key] = _CONSTANT
            elif facts.name in _COPYING and len(tensors) == 1 and tensor.itemsize >= tensors[0].itemsize:
                (origin,) = origins
                if origin is not None:
                    self._origins[key] = origin

    def _origin(self, tensor: Tensor) -> int | None:
        if tensor.dtype not in INDICES:
            return None
        key = storage_key(tensor)
        return self._origins.get(key) if key in self._made else key


def ranges_by_name(recorded: Sequence[IndexRanges], arguments: Mapping[int, str]) -> dict[str, tuple[int, int]] | None:
    """Return the range in which values of arguments must be so that no recorded operator faults.

    Args:
        recorded: the indices of recordings.
        arguments: the names of arguments that are copied to static inputs, by storage key.

    Returns:
        (lowest, highest) by name; None if there is no recording, or if an operator may fault because of other values.
    """
    ranges: dict[str, tuple[int, int]] = {}
    for indices in recorded:
        if indices.may_fault or not indices.ranges.keys() <= arguments.keys():
            return None
        for key, (low, high) in indices.ranges.items():
            lowest, highest = ranges.get(arguments[key], (low, high))
            ranges[arguments[key]] = max(lowest, low), min(highest, high)
    return ranges if recorded else None
