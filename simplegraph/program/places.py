"""Remember what code can reach without being passed it; put it back, and name it, where it holds memory of a graph."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

_Answer = TypeVar("_Answer")
ABSENT = object()
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph", "numpy", "triton"}
# Libraries whose objects hold what users put there.
_HOLDING = {"builtins", "collections", "queue", "weakref", "types", "functools", "itertools"}

_MAX_PLACES = 20_000
_MAX_REACHED = 10_000
_DEPTH = 4  # a class, its method, a function that it names, a class or file that this names: further on lie libraries
_LRU: Any = type(functools.lru_cache(bool))
_DULL = (str, bytes, int, float, complex, type(None), types.BuiltinFunctionType, types.CodeType, Tensor)
_DICTS = (collections.OrderedDict, dict)
_LISTS = (list, collections.deque)
MODULES_OWN = frozenset(vars(nn.Module()))
_CODE = (type, types.ModuleType, types.FunctionType)
_FAR = (type, types.ModuleType)  # lead to everything there is


class Surroundings:
    """Remembers what the places hold that objects and code lead to.

    A file leads to what functions that are looked into name there: what else it holds may be a notebook's whole state.
    Bounded: places beyond the first thousands and what belongs to libraries are left out.

    Args:
        roots: modules, functions, classes and other objects.
        depth: how many classes, functions and files of code a place may be away.
    """

    def __init__(self, roots: Iterable[Any] = (), depth: int = _DEPTH) -> None:
        self._places: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by id: the place, and what it held by key
        self._ways: dict[int, tuple[Any, int]] = {}  # by id: a thing that was looked into, and what led to it
        self._changed: list[tuple[Any, Any]] = []  # places that held what they shall not, and the keys
        left = collections.deque((root, 0, 0) for root in roots)
        while left and len(self._places) < _MAX_PLACES:
            value, above, away = left.popleft()
            if id(value) not in self._ways:
                self._ways[id(value)] = value, above
                away += issubclass(type(value), _CODE)
                inside = self._remember(value) if away <= depth else ()
                left.extend((thing, id(value), away) for thing in inside if not issubclass(type(thing), _DULL))

    def _remember(self, value: Any) -> Iterable[Any]:
        """Remember what a thing holds; return what to look into next."""
        kind = type(value)
        is_class, is_module = issubclass(kind, type), issubclass(kind, types.ModuleType)
        is_code = is_class or is_module or kind is types.FunctionType
        if is_code and is_library(value.__name__ if is_module else value.__module__):
            return ()
        if is_module or issubclass(kind, threading.local):  # what is this thread's
            return (vars(value),)
        held = held_by(value)
        if held is None:
            return gc.get_referents(value) if _is_looked_into(kind) else ()
        self._places[id(value)] = value, held
        if issubclass(kind, _LRU):
            return (value.__wrapped__,)
        if kind is types.FunctionType:
            passed = value.__closure__, value.__defaults__, value.__kwdefaults__
            return value.__globals__, *_named_by(value), *held.values(), *passed
        if kind is dict and "__builtins__" in held:
            return ()  # functions lead to what they name there
        if issubclass(kind, nn.Module):  # most of its own dicts, for hooks, are empty
            return kind, *(item for name, item in held.items() if name not in MODULES_OWN or item)
        if is_class:
            return *held.values(), *value.__bases__, getattr(sys.modules.get(value.__module__), "__dict__", None)
        # An object's own dict is no place beside it; items of a tuple's subclass and such are no attributes.
        return *held.values(), *(thing for thing in gc.get_referents(value) if type(thing) is not dict)

    def release(self, things: Collection[Any]) -> list[str]:
        """Let every place hold what it held where it came to hold one of these things, or what leads to one.

        Args:
            things: what no place shall hold.

        Returns:
            The names of those places.
        """
        wanted, names = set(map(id, things)), []
        for place, before in list(self._places.values()):
            now = (held_by(place) or {}).items()
            new = ((key, value) for key, value in now if value is not before.get(key, ABSENT))
            keys = [key for key, value in new if self._leads_to(value, wanted)]
            if type(place) is _LRU and any(self._leads_to(item, wanted) for item in gc.get_referents(place)):
                names.append(f"the cache of {place.__qualname__}")
                place.cache_clear()
            elif keys:
                names.append(self._name(keys[0], place))
                self._changed += [(place, key) for key in keys]
                _restore(place, before, keys)
        return list(dict.fromkeys(names))

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

    def _name(self, key: Any, *from_place: Any) -> str:
        """Name what a place, the last of these, holds by a key, by the first thing on the way to it that has a name."""
        held, way = "", [*from_place]
        while True:
            thing, above = self._ways[id(way[-1])]
            kind: Any = type(thing)
            if kind is types.FunctionType:
                return _name_in_function(thing, way, key)
            if kind is dict and "__builtins__" in thing:
                return f"the global {key} of {thing.get('__name__')}"
            if issubclass(kind, type):
                held = held or f"the attribute {key} of class {thing.__qualname__}"
            elif kind.__module__ not in _HOLDING:
                held = held or f"the attribute {key} of a {kind.__qualname__}"
            if issubclass(kind, (type, nn.Module)) or not above:
                return held or f"a {kind.__name__}"
            way.append(self._ways[above][0])
            key = next((name for name, item in (held_by(way[-1]) or {}).items() if item is thing), "?")

    def put_back_as(self, earlier: Surroundings) -> None:
        """Let the places where something was put back hold what they held even earlier."""
        for place, key in self._changed:
            if id(place) in earlier._places:
                keys = held_by(place) or {} if issubclass(type(place), _LISTS) else [key]
                _restore(place, earlier._places[id(place)][1], keys)


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function names in its file, and in files that it names there or has in its closure."""
    names, cells = sorted(_names_in(function.__code__)), map(held_by, function.__closure__ or ())
    files = [function.__globals__, *_files_in(item for held in cells for item in (held or {}).values())]
    for file in files:  # which grows meanwhile
        things = [file[name] for name in names if name in file]
        files += [one for one in _files_in(things) if not any(one is other for other in files)]
        yield from things


def _files_in(things: Iterable[Any]) -> list[dict[str, Any]]:
    return [vars(thing) for thing in things if type(thing) is types.ModuleType and not is_library(thing.__name__)]


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that code has, and the functions in it."""
    inner = (_names_in(value) for value in code.co_consts if isinstance(value, types.CodeType))
    return set(code.co_names).union(*inner)


def _name_in_function(function: types.FunctionType, way: Sequence[Any], key: Any) -> str:
    """Name a place that a function leads to; `way` ends with the function."""
    below, closure = way[-2] if len(way) > 1 else way, function.__closure__ or ()
    name = next((name for name, item in function.__globals__.items() if item is below), None)
    if name is not None:
        return f"the global {name} of {function.__globals__.get('__name__')}"
    if below is closure:
        variable = function.__code__.co_freevars[next(at for at, cell in enumerate(closure) if cell is way[-3])]
        return f"the variable {variable} in the closure of {function.__qualname__}"
    if below is function.__defaults__ or below is function.__kwdefaults__:
        return f"a default argument of {function.__qualname__}"
    return f"the attribute {key} of {function.__qualname__}"


def _restore(place: Any, before: dict[Any, Any], keys: Collection[Any]) -> None:
    """Let a place hold by these keys what it held before."""
    base = _base_of(type(place))
    if base not in _LISTS:
        now = held_by(place) or {}
        for key in keys:
            if now.get(key, ABSENT) is not before.get(key, ABSENT):
                put(place, key, before.get(key, ABSENT))
        return
    rest = [value for index, value in enumerate(base.__iter__(place)) if index not in keys]
    # What another thread put there meanwhile stays, where only additions have to go.
    complete = {*map(id, before.values())} <= {*map(id, rest)}
    base.clear(place)
    base.extend(place, rest if complete else before.values())


def held_by(place: Any) -> dict[Any, Any] | None:
    """Return what a container, a cell, a function, a class or an object holds, by key; None if it is none of these."""
    kind = type(place)
    base = _base_of(kind)
    if base in _DICTS:
        return dict(dict.items(place))
    if base in _LISTS:
        return dict(enumerate(base.__iter__(place)))
    if base is set:
        return {item: item for item in set.__iter__(place)}
    if kind is types.CellType:
        return {"": place.cell_contents} if gc.get_referents(place) else {}  # an empty one
    if kind is types.FunctionType or base is type:
        return dict(vars(place))
    return dict(_attributes(place)) if kind.__module__ != "builtins" and _is_looked_into(kind) else None


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
    gone, base = value is ABSENT, _base_of(type(place))
    if base is set:
        set.discard(place, key) if gone else set.add(place, key)
    elif base in (type, object):
        name = key or "cell_contents"
        base.__delattr__(place, name) if gone else base.__setattr__(place, name, value)
    else:
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)


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
def _base_of(kind: type) -> Any:
    """Return the class whose methods read and write a container or a class, past what its own class makes of them."""
    return next((base for base in (*_DICTS, *_LISTS, set, type) if issubclass(kind, base)), object)


@by_class
def _slots(kind: type) -> list[tuple[str, types.MemberDescriptorType]]:
    members = (member for base in kind.__mro__ for member in vars(base).items())
    return [(name, member) for name, member in members if type(member) is types.MemberDescriptorType]


@by_class
def _is_looked_into(kind: type) -> bool:
    """True for objects that hold what users put there."""
    library = str(kind.__module__).partition(".")[0]
    users = issubclass(kind, nn.Module) or library in _HOLDING or not is_library(library)
    return users and not hasattr(kind, "__torch_function__")
