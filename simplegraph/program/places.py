"""Remember what code can reach without being passed it, and put it back where it came to hold memory of a graph."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

_Answer = TypeVar("_Answer")
ABSENT = object()
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph", "numpy", "triton"}
# Libraries whose objects hold what users put there.
_HOLDING = {"builtins", "collections", "queue", "weakref", "types", "functools"}

_MAX_PLACES = 20_000
_MAX_REACHED = 10_000
_DEPTH = 4  # a class, its module, a function there, a class or file that it names: further on lie whole libraries
_LRU: Any = type(functools.lru_cache(bool))
_DULL = (str, bytes, int, float, complex, type(None), types.BuiltinFunctionType, types.CodeType, Tensor)
_LISTS = (list, collections.deque)
_MODULES_OWN = frozenset(vars(nn.Module()))
_CODE = (type, types.ModuleType, types.FunctionType)
_FAR = (type, types.ModuleType)  # lead to everything there is


class Surroundings:
    """Remembers what the places hold that objects and code lead to.

    Bounded: places beyond the first thousands and what belongs to libraries are left out.

    Args:
        roots: modules, functions, classes and other objects.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._places: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by id: the place, and what it held by key
        self._changed: list[tuple[Any, Any]] = []  # places that held what they shall not, and the keys
        left = collections.deque((root, 0) for root in roots)
        seen: set[int] = set()
        while left and len(self._places) < _MAX_PLACES:
            value, depth = left.popleft()
            if id(value) not in seen:
                seen.add(id(value))
                depth += issubclass(type(value), _CODE)
                inside = self._remember(value) if depth <= _DEPTH else ()
                left.extend((thing, depth) for thing in inside if not issubclass(type(thing), _DULL))

    def _remember(self, value: Any) -> Iterable[Any]:
        """Remember what a thing holds; return what to look into next."""
        kind = type(value)
        is_class, is_module = issubclass(kind, type), issubclass(kind, types.ModuleType)
        code = is_class or is_module or kind is types.FunctionType
        if code and is_library(value.__name__ if is_module else value.__module__):
            return ()
        if issubclass(kind, threading.local):
            return (value.__dict__,)  # this thread's
        held = held_by(value)
        if held is None:
            return gc.get_referents(value) if _is_looked_into(kind) else ()
        self._places[id(value)] = value, held
        if issubclass(kind, _LRU):
            return (value.__wrapped__,)
        if kind is types.FunctionType:
            return *held.values(), value.__closure__, value.__defaults__, value.__kwdefaults__, value.__globals__
        if issubclass(kind, nn.Module):  # most of its own dicts, for hooks, are empty
            return kind, *(item for name, item in held.items() if name not in _MODULES_OWN or item)
        if is_class:
            return *held.values(), *value.__bases__, sys.modules.get(value.__module__)
        # An object's own dict is no place beside it; items of a tuple's subclass and such are no attributes.
        return *held.values(), *(thing for thing in gc.get_referents(value) if type(thing) is not dict)

    def release(self, things: Collection[Any]) -> None:
        """Let every place hold what it held where it came to hold one of these things, or what leads to one.

        Args:
            things: what no place shall hold.
        """
        wanted = set(map(id, things))
        for place, before in list(self._places.values()):
            now = (held_by(place) or {}).items()
            new = ((key, value) for key, value in now if value is not before.get(key, ABSENT))
            keys = [key for key, value in new if self._leads_to(value, wanted)]
            if type(place) is _LRU:
                if any(self._leads_to(item, wanted) for item in gc.get_referents(place)):
                    place.cache_clear()
            elif keys:
                self._changed += [(place, key) for key in keys]
                _restore(place, before, keys)

    def _leads_to(self, value: Any, wanted: set[int]) -> bool:
        """True if a value is one of the things, or holds one; what is a place itself is asked by itself."""
        level, seen = [value], {id(value)}
        while level and len(seen) < _MAX_REACHED:
            if any(id(thing) in wanted for thing in level):
                return True
            below = [thing for thing in level if id(thing) not in self._places and not issubclass(type(thing), _FAR)]
            level = [thing for thing in gc.get_referents(*below) if id(thing) not in seen]
            seen.update(map(id, level))
        return False

    def put_back_as(self, earlier: Surroundings) -> None:
        """Let the places where something was put back hold what they held even earlier."""
        for place, key in self._changed:
            if id(place) in earlier._places:
                keys = held_by(place) or {} if issubclass(type(place), _LISTS) else [key]
                _restore(place, earlier._places[id(place)][1], keys)


def _restore(place: Any, before: dict[Any, Any], keys: Collection[Any]) -> None:
    """Let a place hold by these keys what it held before."""
    if not issubclass(type(place), _LISTS):
        now = held_by(place) or {}
        for key in keys:
            if now.get(key, ABSENT) is not before.get(key, ABSENT):
                put(place, key, before.get(key, ABSENT))
        return
    base: Any = list if issubclass(type(place), list) else collections.deque
    rest = [value for index, value in enumerate(base.__iter__(place)) if index not in keys]
    # What another thread put there meanwhile stays, where only additions have to go.
    complete = {*map(id, before.values())} <= {*map(id, rest)}
    base.clear(place)
    base.extend(place, rest if complete else before.values())


def held_by(place: Any) -> dict[Any, Any] | None:
    """Return what a container, a cell, a function, a class or an object holds, by key; None if it is none of these."""
    kind = type(place)
    if issubclass(kind, dict):
        return dict(dict.items(place))
    if issubclass(kind, _LISTS):
        base: Any = list if issubclass(kind, list) else collections.deque
        return dict(enumerate(base.__iter__(place)))
    if issubclass(kind, set):
        return {item: item for item in set.__iter__(place)}
    if kind is types.CellType:
        return dict(_contents(place))
    if kind is types.FunctionType or issubclass(type(place), type):
        return dict(vars(place))
    return dict(_attributes(place)) if kind.__module__ != "builtins" and _is_looked_into(kind) else None


def _contents(cell: types.CellType) -> Iterator[tuple[str, Any]]:
    try:
        yield "", cell.cell_contents
    except ValueError:  # empty
        return


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes and filled slots, and run none of its code."""
    for name, slot in _slots(type(thing)):
        with contextlib.suppress(AttributeError):
            yield name, slot.__get__(thing)
    with contextlib.suppress(AttributeError):
        yield from object.__getattribute__(thing, "__dict__").items()


def put(place: Any, key: Any, value: Any) -> None:
    """Let a place hold a value by a key, or nothing if it is `ABSENT`.

    Args:
        place: anything that `held_by` can read.
        key: as `held_by` gives it.
        value: what it shall hold there.
    """
    gone = value is ABSENT
    if issubclass(type(place), dict):
        base: Any = collections.OrderedDict if issubclass(type(place), collections.OrderedDict) else dict
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)
    elif issubclass(type(place), _LISTS):
        base = list if issubclass(type(place), list) else collections.deque
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)
    elif issubclass(type(place), set):
        set.discard(place, key) if gone else set.add(place, key)
    else:
        base = type if issubclass(type(place), type) else object
        name = key or "cell_contents"
        base.__delattr__(place, name) if gone else base.__setattr__(place, name, value)


def is_namespace(place: Any) -> bool:
    """True for the globals of a module of Python."""
    if type(place) is not dict or type(place.get("__name__")) is not str:
        return False
    return getattr(sys.modules.get(place["__name__"]), "__dict__", None) is place


def is_library(name: Any) -> bool:
    """True for modules of Python, by name, that keep no tensors of users."""
    return str(name).partition(".")[0] in _LIBRARIES


def by_class(function: Callable[[type], _Answer]) -> Callable[[type], _Answer]:
    """Remember what a function returns for a class as long as the class lives.

    A class made for one object, as transformers' models get one for their graphs, may hold the object.
    """
    answers: dict[int, tuple[_Answer, weakref.ref[type]]] = {}

    def remembered(kind: type) -> _Answer:
        found = answers.get(number := id(kind))
        if found is None:
            gone = weakref.ref(kind, lambda _: answers.pop(number, None))
            found = answers[number] = function(kind), gone
        return found[0]

    return remembered


@by_class
def _slots(kind: type) -> list[tuple[str, types.MemberDescriptorType]]:
    members = (member for base in kind.__mro__ for member in vars(base).items())
    return [(name, member) for name, member in members if type(member) is types.MemberDescriptorType]


@by_class
def _is_looked_into(kind: type) -> bool:
    """True for objects that hold what users put there."""
    if issubclass(kind, (nn.Module, types.ModuleType)):
        return True
    library = str(kind.__module__).partition(".")[0]
    users = library in _HOLDING or not is_library(library)
    return users and not hasattr(kind, "__torch_function__")
