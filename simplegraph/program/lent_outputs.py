"""Static outputs, and if a caller still holds one."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.tensors import storage_key

# Private to torch: the number of tensors and other objects that own a storage. Without it, outputs count as held.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class LentOutputs:
    """The outputs of one graph in graph memory, which callers are handed as aliases.

    Every owner of this memory but those that are known here is a caller's tensor: an alias, or a view of one.

    Args:
        outputs: the leaves of the graph's result.
    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._tensors = {id(leaf) for leaf in outputs if issubclass(type(leaf), Tensor)}
        tensors = {id(leaf): leaf for leaf in outputs if id(leaf) in self._tensors}.values()
        self._storages = {storage_key(leaf): leaf.untyped_storage() for leaf in tensors}
        self._owners = collections.Counter([*self._storages, *map(storage_key, tensors)])

    def add_owner(self, owner: Any, views: Sequence[Any]) -> None:
        """Note that an object of this library keeps views of the outputs, or the outputs themselves, while it lives."""
        tensors = {id(view): view for view in views if issubclass(type(view), Tensor) and id(view) not in self._tensors}
        keys = [key for key in map(storage_key, tensors.values()) if key in self._storages]
        self._owners.update(keys)
        weakref.finalize(owner, self._owners.subtract, keys).atexit = False

    def are_held(self) -> bool:
        """True if a caller holds one of them, or if this is not known."""
        if _use_count is None or not self._storages:
            return True
        return any(_use_count(key) > self._owners[key] for key in self._storages)

    def drop(self) -> None:
        """Release the memory: the graph is dropped, and who holds its outputs is not known any more."""
        self._storages = {}
