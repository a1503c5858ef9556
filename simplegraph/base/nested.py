"""Flatten nested values into leaves and rebuild them; keys of constant leaves."""

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

from simplegraph.base.objects import attribute_of, class_member, own_dict


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """The structure of a nested value. Equal structures have equal specs. A spec without a type is a leaf.

    Containers are lists, tuples, named tuples, mappings, dataclasses that hold only their fields, and registered pytree
    nodes such as transformers' ModelOutput. Everything else is a leaf.
    """

    type: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeSpec, ...] = ()
    context: Any = dataclasses.field(default=None, hash=False)  # a registered node's own; of a dict the types of keys

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Rebuild the nested value from its leaves."""
        remaining = iter(leaves)  # an iterator is returned itself, so that each child continues after the last one
        if self.type is None:
            return next(remaining)
        children = [child.unflatten(remaining) for child in self.children]
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
            return tuple.__new__(self.type, children)
        # Not through __init__, which may validate, convert or copy values that must stay the same tensors.
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

    def leads_with_batch(self, *, leads: bool = False) -> list[bool]:
        """Return for every leaf True if a mapping around it declares the first dimension as the batch's."""
        if self.type is None:
            return [leads]
        library = library_mapping(self.type)
        leads = leads or (library is not None and library.leads_with_batch(self.context))
        return [leaf_leads for child in self.children for leaf_leads in child.leads_with_batch(leads=leads)]


LEAF = TreeSpec()
_PLAIN_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str})  # the common ones


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a nested value in order, and its structure."""
    leaves: list[Any] = []
    return leaves, _flatten_into(value, leaves)


def _flatten_into(value: Any, leaves: list[Any]) -> TreeSpec:
    kind = type(value)
    opened = None if kind in _PLAIN_LEAVES else opened_once(value)  # fast, since replays call this
    if opened is None:
        leaves.append(value)
        return LEAF
    keys, values, context = opened
    return TreeSpec(kind, tuple(keys), tuple(_flatten_into(item, leaves) for item in values), context)


def map_leaves(value: Any, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """Change the wanted leaves of a nested value; without such leaves, return the value itself."""
    leaves, spec = flatten(value)
    if not any(map(wanted, leaves)):
        return value
    return spec.unflatten(change(leaf) if wanted(leaf) else leaf for leaf in leaves)


def containers(value: Any) -> list[Any]:
    """List the mutable containers of a nested value, including the value itself."""
    opened = None if type(value) in _PLAIN_LEAVES else opened_once(value)
    if opened is None:
        return []
    changeable = [] if issubclass(type(value), tuple) else [value]
    return changeable + [container for item in opened[1] for container in containers(item)]


Opened = tuple[Iterable[Any], Iterable[Any], Any]


@dataclasses.dataclass(frozen=True)
class LibraryMapping:
    """Functions that read, rebuild and write the mappings of a library's class, without importing the library.

    Attributes:
        library: the library's name.
        open: opens one level, like `opened_once`; returns None for a mapping that is a leaf.
        items: returns the items, whose keys are strings; no items for a leaf.
        leads_with_batch: returns True if all tensors inside have the batch first, given the context from `open`.
        state: returns the other state that a call may change, such as the batch size.
        put: sets an item.
        remove: deletes an item.
    """

    library: str
    open: Callable[[Any], Opened | None]
    items: Callable[[Any], dict[str, Any]]
    leads_with_batch: Callable[[Any], bool]
    state: Callable[[Any], Hashable]
    put: Callable[[Any, str, Any], object]
    remove: Callable[[Any, str], object]


# By the name of the class, or by an attribute that a library sets on users' classes that it turns into mappings.
LIBRARY_MAPPINGS: dict[str, LibraryMapping] = {}
MARKED_MAPPINGS: dict[str, LibraryMapping] = {}
# By the library's name, the advice for its other mappings.
LIBRARY_REMEDIES: dict[str, str] = {}
# By an argument's name, the advice for an object that no graph can be passed; by the end of a class's name, the advice
# for one that no replay can return. Extras fill all these tables.
ARGUMENT_REMEDIES: dict[str, str] = {}
OUTPUT_REMEDIES: dict[str, str] = {}


def library_mapping(kind: type) -> LibraryMapping | None:
    """Return the functions for mappings of a class; None if it is not a registered class."""
    named = LIBRARY_MAPPINGS.get(kind.__name__)
    if named is not None and named.library == _library_of(kind):
        return named
    marked = next((mapping for mark, mapping in MARKED_MAPPINGS.items() if mark in vars(kind)), None)
    return None if marked is None or marked.library == _library_of(kind) else marked


def library_remedy(kind: type) -> str:
    """Return the advice for a library's mapping that can be read but not written; empty for other classes."""
    return "" if library_mapping(kind) is not None else LIBRARY_REMEDIES.get(_library_of(kind), "")


def _library_of(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def opened_once(value: Any) -> Opened | None:
    """Return a container's keys, its values, and the context for rebuilding it; None for a leaf."""
    opened = _opened_plain(value)
    return _opened_mapping(value) if opened is None and issubclass(type(value), Mapping) else opened


def _opened_plain(value: Any) -> Opened | None:
    """Open a container of a known class, a registered one, or a dataclass."""
    kind: Any = type(value)
    if kind is list or kind is tuple:
        return range(len(value)), value, None
    if kind is dict or kind is OrderedDict:
        texts = all(type(key) is str for key in value)  # keys that are equal, as 1 and True, differ by their types
        return value.keys(), value.values(), None if texts else tuple(map(type, value))
    if (library := library_mapping(kind)) is not None:
        return library.open(value)
    if kind in pytree.SUPPORTED_NODES and kind is not torch.Size:  # a pytree node that comes back as a tuple
        node = pytree.SUPPORTED_NODES[kind]
        values, context = node.flatten_fn(value)
        return range(len(values)), values, (node.unflatten_fn, context)
    # Only an object that holds nothing beside its fields can be rebuilt from them.
    names = _fields(kind)
    if names is None or not set(names).issuperset(own_dict(value) or ()):
        return None
    if issubclass(kind, tuple):
        items = tuple(tuple.__iter__(value))
        return (names, items, None) if len(items) == len(names) and not own_dict(value) else None
    field_values = [attribute_of(value, name, _ABSENT) for name in names]
    return None if any(item is _ABSENT for item in field_values) else (names, field_values, None)


_ABSENT = object()
_SLOT = types.MemberDescriptorType


@functools.lru_cache(maxsize=1024)
def _fields(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a named tuple or a dataclass; None if an instance may hold more than its fields."""
    in_c = [base for base in kind.__mro__ if type(vars(base).get("__new__")) is types.BuiltinFunctionType]
    if in_c == [tuple, object]:
        return class_member(kind, "_fields")  # type: ignore[no-any-return]
    if in_c != [object] or class_member(kind, "__dataclass_fields__") is None:
        return None
    names = tuple(field.name for field in dataclasses.fields(kind))
    slots = (name for base in kind.__mro__ for name, member in vars(base).items() if type(member) is _SLOT)
    return names if set(names).issuperset(slots) else None


# Mappings of other classes: UserDict, subclasses of UserDict and dict, read-only views, classes of users.

_ITEMS = ""  # stands for the attribute that holds a mapping's items, which has no part in the names of leaves


class WithheldError(RuntimeError):
    """A captured forward read a `Withheld` object. Eager calls may read the original."""


class Withheld:
    """Replaces, in a capture, an object that may differ from call to call, such as a tokenizer's encodings.

    A captured forward that reads it is refused.

    Args:
        kind: the type of the object.
        where: the place of the object, for messages.
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
    """Open a mapping that can be rebuilt from its items and attributes without running its code; None for others."""
    kind: Any = type(value)
    base = _base_of_mapping(kind)
    if base is None:
        return None
    items = dict(base.items(value)) if base is not object else {}
    attributes = own_dict(value) or {}
    names, values, repeated = list(items), list(items.values()), []
    for name, item in attributes.items():
        if name in items and items[name] is item:  # an attribute for each item, as transformers' outputs have
            repeated.append(name)
            continue
        holds_items = type(item) is dict and item.keys() == (_keys_of(value) if base is object else items.keys())
        names.append(_ITEMS if holds_items else name)
        values.append(item if holds_items or _is_plain(item) else _withheld(type(item)))
    others = tuple(name for name in attributes if name not in repeated)
    return names, values, (_rebuilt_mapping, (base, kind, tuple(items), others, tuple(repeated)))


def _keys_of(value: Mapping[Any, Any]) -> Any:
    """Return the keys of a mapping by running its own code; None if that fails."""
    try:
        return set(value)
    except Exception:
        return None


@functools.lru_cache(maxsize=1024)
def _base_of_mapping(kind: Any) -> Any:
    """Return the builtin class that stores a mapping's items; object if attributes do; None if the state is hidden."""
    base = next(base for base in (OrderedDict, dict, object) if issubclass(kind, base))
    slots = [vars(parent).get("__slots__", ()) for parent in kind.__mro__]
    hidden = any(set([names] if isinstance(names, str) else names) - {"__dict__", "__weakref__"} for names in slots)
    in_c = isinstance(kind.__new__, types.BuiltinFunctionType) and kind.__new__ is not base.__new__
    empty = base is object and not kind.__dictoffset__
    return None if hidden or in_c or empty else base


def _is_plain(value: Any) -> bool:
    """True for tensors, numbers, functions and the like, and for containers of such values only."""
    opened = None if type(value) in _PLAIN_LEAVES else _opened_plain(value)
    if opened is not None:
        return all(map(_is_plain, opened[1]))
    return issubclass(type(value), (torch.Tensor, *ATOMS, types.FunctionType, types.BuiltinFunctionType))


def _rebuilt_mapping(children: list[Any], context: tuple[Any, ...]) -> Any:
    """Rebuild a mapping without its ``__init__`` and ``__setitem__``, which may convert or copy values."""
    base, kind, keys, attributes, repeated = context
    mapping = base.__new__(kind)
    for key, item in zip(keys, children[: len(keys)], strict=True):
        base.__setitem__(mapping, key, item)
    if attributes or repeated:
        namespace = vars(mapping)
        namespace.update((name, base.__getitem__(mapping, name)) for name in repeated)
        namespace.update(zip(attributes, children[len(keys) :], strict=True))
    return mapping


ATOMS: tuple[type, ...] = (type(None), bool, int, float, complex, str, bytes, type, enum.Enum, slice, range)
ATOMS += (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
# Leaves of outputs that a replay can return.
RETURNABLE: tuple[type, ...] = (torch.Tensor, type(None), bool, int, float, complex, str, bytes)
RETURNABLE += (torch.dtype, torch.device, torch.Size)


# Functions that read the value of a subclass of these types without running its methods.
_VALUE_OF: dict[type, Callable[[Any], Any]] = {
    bool: bool,
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
}


def constant_key(value: Any) -> Hashable:
    """Return a key that is equal for equal values of one type; 0.0 and -0.0 differ, all NaNs are equal."""
    kind = type(value)
    if issubclass(kind, frozenset):
        return frozenset((type(item), constant_key(item)) for item in frozenset.__iter__(value))
    if kind not in _VALUE_OF and issubclass(kind, tuple(_VALUE_OF)):
        value = next(read for base, read in _VALUE_OF.items() if issubclass(kind, base))(value)
    by_text = not issubclass(kind, int) and issubclass(kind, (slice, numbers.Number))
    return repr(value) if by_text else value
