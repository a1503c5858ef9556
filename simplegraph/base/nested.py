"""Nested values: containers taken apart into leaves and rebuilt, and the plain values among the leaves."""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """The nesting of leaves. Equal specs nest alike; a spec without a type is one leaf.

    Containers are lists, tuples, named tuples, mappings, dataclasses that hold nothing beside their fields,
    and whatever is registered as a pytree node (transformers' ModelOutput, for one). Everything else is a leaf.
    """

    type: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeSpec, ...] = ()
    context: Any = dataclasses.field(default=None, hash=False)  # a registered node's own; of a dict the types of keys

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Rebuild the nested value from its leaves."""
        left = iter(leaves)  # of an iterator this is the iterator itself: each child takes up where the last one ended
        if self.type is None:
            return next(left)
        children = [child.unflatten(left) for child in self.children]
        if self.type is list:
            return children
        if self.type is tuple:
            return tuple(children)
        if self.type in (dict, OrderedDict):
            return self.type(zip(self.keys, children, strict=True))
        if self.context is not None:
            rebuild: Callable[[list[Any], Any], Any] = self.context[0]
            return rebuild(children, self.context[1])
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
            for name in child.names(prefix if key is _ITEMS else f"{prefix}.{key}" if prefix else str(key))
        ]


LEAF = TreeSpec()
_PLAIN_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})  # the common ones


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Take a nested value apart: its leaves in order, and their nesting."""
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(value: Any, leaves: list[Any]) -> TreeSpec:
    kind = type(value)
    opened = None if kind in _PLAIN_LEAVES else opened_once(value)  # this is on the way to replays
    if opened is None:
        leaves.append(value)
        return LEAF
    keys, values, context = opened
    return TreeSpec(kind, tuple(keys), tuple(_flatten_into(item, leaves) for item in values), context)


def map_leaves(value: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Change the wanted leaves of a nested value; without any it is returned itself, the very containers."""
    leaves, spec = flatten(value)
    if not any(map(wanted, leaves)):
        return value
    return spec.unflatten(change(leaf) if wanted(leaf) else leaf for leaf in leaves)


def containers(value: Any) -> list[Any]:
    """List the containers of a nested value that can be changed, itself included."""
    opened = None if type(value) in _PLAIN_LEAVES else opened_once(value)
    if opened is None:
        return []
    own = [] if isinstance(value, tuple) else [value]
    return own + [found for item in opened[1] for found in containers(item)]


Opened = tuple[Iterable[Any], Iterable[Any], Any]


def opened_once(value: Any) -> Opened | None:
    """Open a container: its keys, its values, and what other than builtin ones are rebuilt with; None for a leaf."""
    opened = _opened_plain(value)
    return _opened_mapping(value) if opened is None and isinstance(value, Mapping) else opened


def _opened_plain(value: Any) -> Opened | None:
    """Open a container of a known class, a registered one, or a dataclass."""
    kind = type(value)
    if kind is list or kind is tuple:
        return range(len(value)), value, None
    if kind is dict or kind is OrderedDict:
        texts = all(type(key) is str for key in value)  # keys that are equal, as 1 and True, differ by their types
        return value.keys(), value.values(), None if texts else tuple(map(type, value))
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


# Mappings of other classes: UserDict and what is derived from it or from dict, read-only views, classes of the user's.

_ITEMS = ""  # the key of the attribute that holds a mapping's items: names of leaves go without it


class WithheldError(RuntimeError):
    """A forward that is being captured read what a `Withheld` stands for; eager calls may."""


class Withheld:
    """Stands in a capture for an object that may differ from call to call, such as a tokenizer's encodings.

    Captured calls do not read it: a forward that does is refused.

    Args:
        kind: the type that it stands for.
        where: where it is found, for messages.
    """

    def __init__(self, kind: type, where: str = "beside the items of a mapping") -> None:
        self.__dict__.update(kind=kind, where=where)

    def __repr__(self) -> str:
        return f"a {self.__dict__['kind'].__name__} {self.__dict__['where']}"

    def __eq__(self, other: object) -> bool:
        return type(other) is Withheld and other.__dict__["kind"] is self.__dict__["kind"]

    def __hash__(self) -> int:
        return hash(self.__dict__["kind"])

    def _refuse(self, *_: Any) -> NoReturn:
        raise WithheldError(f"the forward reads {self!r}")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse


_withheld: Callable[[Any], Withheld] = functools.lru_cache(maxsize=256)(
    Withheld
)  # one a type: equal calls, equal leaves


def _opened_mapping(value: Any) -> Opened | None:
    """Open a mapping that can be rebuilt without its own code: from its items, its attributes, or both."""
    kind: Any = type(value)
    base = _base_of_mapping(kind)
    if base is None:
        return None
    items = dict(base.items(value)) if base is not object else {}
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    names, held = list(items), list(items.values())
    for name, item in attributes.items():
        holds_items = type(item) is dict and len(item) == len(value) and item.keys() == value.keys()
        names.append(_ITEMS if holds_items else name)
        held.append(item if holds_items or _is_plain(item) else _withheld(type(item)))
    return names, held, (_rebuilt_mapping, (base, kind, tuple(items), tuple(attributes)))


@functools.lru_cache(maxsize=1024)
def _base_of_mapping(kind: Any) -> Any:
    """Return the builtin class that holds a mapping's items, object if attributes do, None if its state is hidden."""
    base = next(base for base in (OrderedDict, dict, object) if issubclass(kind, base))
    slots = [vars(parent).get("__slots__", ()) for parent in kind.__mro__]
    hidden = any(set([names] if isinstance(names, str) else names) - {"__dict__", "__weakref__"} for names in slots)
    in_c = isinstance(kind.__new__, types.BuiltinFunctionType) and kind.__new__ is not base.__new__
    empty = base is object and not kind.__dictoffset__
    return None if hidden or in_c or empty else base


def _is_plain(value: Any) -> bool:
    """True for tensors, numbers, functions and the like, and for containers of nothing else."""
    opened = None if type(value) in _PLAIN_LEAVES else _opened_plain(value)
    if opened is not None:
        return all(map(_is_plain, opened[1]))
    return isinstance(value, (torch.Tensor, *ATOMS, types.FunctionType, types.BuiltinFunctionType))


def _rebuilt_mapping(children: list[Any], context: tuple[Any, ...]) -> Any:
    """Rebuild a mapping without its ``__init__`` and ``__setitem__``, which may convert or copy what they get."""
    base, kind, keys, attributes = context
    mapping = base.__new__(kind)
    for key, item in zip(keys, children[: len(keys)], strict=True):
        base.__setitem__(mapping, key, item)
    if attributes:
        vars(mapping).update(zip(attributes, children[len(keys) :], strict=True))
    return mapping


ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, type, enum.Enum, slice, range)
ATOMS += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


def constant_key(value: Any) -> Hashable:
    """Return a key that tells a value from others of its type: 0.0 from -0.0, but not one NaN from another."""
    if isinstance(value, frozenset):
        return frozenset((type(item), constant_key(item)) for item in value)
    by_text = not isinstance(value, int) and isinstance(value, (slice, numbers.Number))
    return repr(value) if by_text else value
