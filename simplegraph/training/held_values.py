"""Find the plain values that optimizers and gradient scalers hold: steps read them, so they are part of the key."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn, optim
from torch.amp import GradScaler

from simplegraph.base.nested import ATOMS
from simplegraph.base.objects import own_dict
from simplegraph.base.walk import (
    DICTS,
    MAX_WIDTH,
    Policy,
    Walk,
    held_by,
    holder_of,
    is_library,
    items_of,
    kind_of,
    shown,
)
from simplegraph.guard.code_below import functions_in
from simplegraph.guard.functions import Attributes, CodePlace, Items
from simplegraph.guard.values import SameObject, is_small_array
from simplegraph.guard.versions import dict_version

MAX_HELD = 2_000  # containers and objects that one optimizer may lead to
_EXACT = (dict, list)
_SIZED = (*DICTS, list, set, tuple, collections.deque)


class Entries:
    """Gives the names of attributes, or the items of a container, as one tuple: the same tuple while they stay.

    Args:
        read: returns the names or items.
    """

    def __init__(self, read: Callable[[], tuple[Any, ...]]) -> None:
        self._read, self._entries = read, read()

    def __getitem__(self, key: str) -> tuple[Any, ...]:
        now = self._read()
        if len(now) != len(self._entries) or not all(map(operator.is_, now, self._entries)):
            self._entries = now
        return self._entries


class Lengths:
    """Gives the lengths of containers as one tuple, the same tuple while they stay; their contents are read separately.

    Attributes:
        containers: plain dicts and lists, of no subclass.
    """

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self._lengths: tuple[int, ...] = ()

    def __getitem__(self, key: str) -> tuple[int, ...]:
        now = tuple(map(len, self.containers))
        if now != self._lengths:
            self._lengths = now
        return self._lengths


class _Size:
    """Gives the version of a large dict, or the length of another large container."""

    def __init__(self, container: Any) -> None:
        self._container = container

    def __getitem__(self, key: str) -> int:
        container = self._container
        return (
            dict_version(container)
            if dict_version and type(container) is dict
            else kind_of(type(container)).__len__(container)
        )

    def __setitem__(self, key: str, value: int) -> None:
        """Leave the container as it is: its contents are restored separately."""


class _Array:
    """Gives the values of a small array of NumPy as bytes."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, key: str) -> bytes:
        values: bytes = self._array.tobytes()
        return values

    def __setitem__(self, key: str, value: bytes) -> None:
        array = self._array
        array[...] = type(array)(array.shape, array.dtype, value)


class HeldValues:
    """Finds the values that an optimizer or a scaler holds in attributes, containers, users' objects and classes.

    Args:
        name: the owner's name; owner: the optimizer or scaler.
        counts: returns True for an attribute of the owner, by name, that steps may read.
        apart: ids of containers that are not opened.

    Attributes:
        name: the owner's name.
        places: the places of all values.
        objects: objects without plain values, to be parts of a key.
        is_complete: False if the owner leads to more objects than are opened.
    """

    def __init__(self, name: str, owner: Any, counts: Callable[[Any], bool], apart: Collection[int] = ()) -> None:
        self.name = name
        self.places: list[CodePlace] = []
        self.objects: list[SameObject] = []
        self._owner, self._counts, self._lengths = owner, counts, Lengths()
        apart = {*apart, *(id(value) for key, value in vars(owner).items() if not counts(key))}
        classes: dict[type, None] = {}
        opened = self._add_all(name, Walk([owner], Policy(_opens, objects=MAX_HELD), apart), classes)
        for kind in (
            base for owner_class in classes for base in owner_class.__mro__ if not is_library(base.__module__)
        ):
            opened += self._add_all(kind.__qualname__, Walk([kind], Policy(_opens, objects=MAX_HELD), apart), {})
        self._add(name, "lengths", self._lengths)
        self.is_complete = opened < MAX_HELD

    def _add_all(self, prefix: str, walk: Walk, classes: dict[type, None]) -> int:
        opened = 0
        for thing, contents, _ in walk:
            opened += 1
            path = walk.path(thing)
            name = f"{prefix}.{path}" if path else prefix
            if kind_of(type(thing)) is object or thing is self._owner:
                classes[type(thing)] = None
            self._add_entries(name, thing)
            for key, value in items_of(contents):
                if thing is self._owner and not self._counts(key):
                    continue
                self.places.append(CodePlace(f"{name}.{shown(key)}", _holder(thing, contents, key), key, value))
                self._add_value(f"{name}.{shown(key)}", value)
        return opened

    def _add_entries(self, name: str, thing: Any) -> None:
        """Add a place that changes if entries are added to an object, or removed."""
        sized = thing if type(thing) in _EXACT else vars(thing) if issubclass(type(thing), type) else None
        if sized is not None:
            self._lengths.containers.append(sized)
        elif type(thing) is not tuple:
            read = functools.partial(tuple, vars(thing)) if thing is self._owner else functools.partial(_entries, thing)
            self._add(name, "entries", Entries(read))

    def _add_value(self, name: str, value: Any) -> None:
        """Add the contents of an entry's value that the walk does not open."""
        kind = type(value)
        if issubclass(kind, (*ATOMS, Tensor, nn.Module)):
            return
        if issubclass(kind, _SIZED):
            if kind_of(kind).__len__(value) > MAX_WIDTH:
                self._add(name, "size", _Size(value))
            elif not value:
                self._add_entries(name, value)
        elif is_small_array(value):
            self._add(name, "values", _Array(value))
        elif kind_of(kind) is not object:
            self.objects.append(SameObject(value))

    def _add(self, name: str, key: str, holder: Any) -> None:
        self.places.append(CodePlace(f"the {key} of {name}", holder, key, holder[key]))


def _entries(thing: Any) -> tuple[Any, ...]:
    return tuple(held_by(thing, _opens(type(thing))))


def users_functions(places: Iterable[CodePlace]) -> list[Any]:
    """List users' functions among the values of places."""
    functions = (function for place in places for function in functions_in(place.value))
    return [function for function in functions if not is_library(getattr(function, "__module__", None))]


def numbers_of_state(name: str, state: Mapping[Any, Any]) -> list[CodePlace]:
    """List the places of plain values in an optimizer's state; guards compare its tensors and containers."""
    holders = {name: state} | {
        f"{name}.{at}": entries for at, entries in enumerate(state.values()) if type(entries) is dict
    }
    return [
        CodePlace(f"{at}.{shown(key)}", entries, key, value)
        for at, entries in holders.items()
        for key, value in entries.items()
        if issubclass(type(value), ATOMS)
    ]


def _opens(kind: type) -> Any:
    if issubclass(kind, (optim.Optimizer, GradScaler)):
        return _attributes
    if issubclass(kind, (Tensor, nn.Module)):
        return None
    if issubclass(kind, type):
        return _class_attributes
    return _contents if issubclass(kind, _SIZED) else kind_of(kind)


def _attributes(owner: Any) -> dict[str, Any]:
    return dict(own_dict(owner) or {})


def _class_attributes(kind: type) -> dict[str, Any] | None:
    if is_library(kind.__module__):
        return None
    return {key: value for key, value in vars(kind).items() if not key.startswith("__") and key != "_abc_impl"}


def _contents(container: Any) -> Any:
    return held_by(container) if kind_of(type(container)).__len__(container) <= MAX_WIDTH else None


def _holder(thing: Any, contents: Any, key: Any) -> Any:
    """Return the mapping by which an entry of an object can be read and set by its key."""
    kind = kind_of(type(thing))
    if issubclass(type(thing), type):
        return Attributes(thing) if issubclass(type(contents[key]), ATOMS) else vars(thing)
    if kind is set:
        return contents
    if issubclass(type(thing), DICTS):
        return thing if type(thing) is dict else Items(thing)
    if kind is object or not issubclass(type(thing), _SIZED):
        holder = holder_of(thing, key)
        return Attributes(thing) if holder is thing else holder
    return thing
