"""Tells if a caller still holds the static outputs of a graph."""

from __future__ import annotations

import collections
import functools
import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.tensors import TELLS_OWNERS, storage_key, storage_uses


class LentOutputs:
    """The outputs of one graph in graph memory, which callers are handed as aliases.

    The owners of this memory are counted: any beyond those in `_owners` is a caller's, an alias or a view of one.

    Args:
        outputs: the leaves of the graph's result.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        tensors = {id(leaf): leaf for leaf in outputs if issubclass(type(leaf), Tensor)}
        self._tensor_ids = frozenset(tensors)
        storages = {storage_key(leaf): leaf.untyped_storage() for leaf in tensors.values()}
        self._storages = list(storages.values())  # if a caller asks for a storage in Python, it is the same object
        self._owners = collections.Counter([*storages, *map(storage_key, tensors.values())])

    def add_owner(self, owner: Any, views: Sequence[Any]) -> None:
        """Note that an object of this library keeps views of the outputs, or the outputs themselves, while it lives."""
        others = (view for view in views if issubclass(type(view), Tensor) and id(view) not in self._tensor_ids)
        tensors = {id(view): view for view in others}
        keys = [key for key in map(storage_key, tensors.values()) if key in self._owners]
        self._owners.update(keys)
        weakref.finalize(owner, self._owners.subtract, keys).atexit = False

    def are_held(self) -> bool:
        """True if a caller holds one of them, or if this is not known."""
        if not TELLS_OWNERS or not self._storages or max(map(sys.getrefcount, self._storages)) > _references_alone():
            return True
        return any(map(operator.gt, map(storage_uses, self._owners), self._owners.values()))

    def drop(self) -> None:
        """Release the memory: the graph is dropped, and who holds its outputs is not known any more."""
        self._storages = []


@functools.cache
def _references_alone() -> int:
    """Count the references to a storage that nothing but a list holds, which depend on torch and Python."""
    tensor = torch.zeros(1, device="cpu")
    return max(map(sys.getrefcount, [tensor.untyped_storage()]))
