"""Nested values: containers taken apart into leaves and rebuilt, and the plain values among the leaves."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """The nesting of leaves. Equal specs nest alike; a spec without a type is one leaf.

    Containers are lists, tuples, named tuples, dicts, dataclasses that hold nothing beside their fields,
    and whatever is registered as a pytree node (transformers' ModelOutput, for one). Everything else is a leaf.
    """

    type: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeSpec, ...] = ()
    context: Any = dataclasses.field(default=None, hash=False)  # a registered node's own, often a list of keys

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Rebuild the nested value from its leaves."""
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.type is None:
            return next(leaves)
        children = [child._build(leaves) for child in self.children]
        if self.type is list:
            return children
        if self.type is tuple:
            return tuple(children)
        if self.type in (dict, OrderedDict):
            return self.type(zip(self.keys, children, strict=True))
        if self.context is not None:
            unflatten: Callable[[list[Any], Any], Any] = self.context[0]
            return unflatten(children, self.context[1])
        if issubclass(self.type, tuple):
            return self.type._make(children)  # type: ignore[attr-defined]
        # Not through __init__: it may validate, convert or copy what must stay the very same tensors.
        value = object.__new__(self.type)
        for name, item in zip(self.keys, children, strict=True):
            object.__setattr__(value, name, item)
        return value

    @property
    def num_leaves(self) -> int:
        """Count the leaves."""
        return 1 if self.type is None else sum(child.num_leaves for child in self.children)

    def names(self, prefix: str) -> list[str]:
        """Return a dotted name for every leaf: ``states.0``, ``batch.mask``."""
        if self.type is None:
            return [prefix]
        return [
            name
            for key, child in zip(self.keys, self.children, strict=True)
            for name in child.names(f"{prefix}.{key}" if prefix else str(key))
        ]


LEAF = TreeSpec()
_PLAIN_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})  # the common ones


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Take a nested value apart: its leaves in order, and their nesting."""
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(value: Any, leaves: list[Any]) -> TreeSpec:
    kind = type(value)
    opened = None if kind in _PLAIN_LEAVES else opened_once(value)
    if opened is None:
        leaves.append(value)
        return LEAF
    keys, values, context = opened
    return TreeSpec(kind, tuple(keys), tuple(_flatten_into(item, leaves) for item in values), context)


def containers(value: Any) -> list[Any]:
    """List the containers of a nested value that can be changed, itself included."""
    opened = None if type(value) in _PLAIN_LEAVES else opened_once(value)
    if opened is None:
        return []
    own = [] if isinstance(value, tuple) else [value]
    return own + [found for item in opened[1] for found in containers(item)]


def opened_once(value: Any) -> tuple[Iterable[Any], Iterable[Any], Any] | None:
    """Open a container: its keys, its values, and what a registered node is rebuilt with; None for a leaf."""
    kind = type(value)
    if kind is list or kind is tuple:
        return range(len(value)), value, None
    if kind is dict or kind is OrderedDict:
        return value.keys(), value.values(), None
    if kind in pytree.SUPPORTED_NODES and kind is not torch.Size:  # a pytree node that comes back as a tuple
        node = pytree.SUPPORTED_NODES[kind]
        values, context = node.flatten_fn(value)
        return range(len(values)), values, (node.unflatten_fn, context)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind._fields, value, None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        # Only one that holds its fields and nothing else can be rebuilt from them.
        if set(names).issuperset(getattr(value, "__dict__", ())) and all(hasattr(value, name) for name in names):
            return names, [getattr(value, name) for name in names], None
    return None


ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, type, enum.Enum, slice, range)
ATOMS += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def constant_key(value: Any) -> Hashable:
    """Return a key that tells a value from others of its type: 0.0 from -0.0, but not one NaN from another."""
    return repr(value) if isinstance(value, (float, complex, slice)) else value


class ById:
    """Puts an object into a key: equal to itself alone, and kept alive, so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self.leaf = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.leaf is self.leaf

    def __hash__(self) -> int:
        return id(self.leaf)
