"""Remember, read and change what globals, closures, containers and objects hold, whatever their classes make of it."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")
ABSENT = object()
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph", "numpy", "triton"}

_MAX_PLACES = 5_000
_MAX_ITEMS = 1_000  # a larger container is a vocabulary or data
_DEPTH = 6  # a class, its module's globals, a function there, the globals of that one, a container, what it holds
_LRU: Any = type(functools.lru_cache(bool))
_DULL = (str, bytes, int, float, complex, type(None), types.BuiltinFunctionType)


class Surroundings:
    """Remembers what the places hold that code can reach without being passed them.

    Bounded: places beyond the first thousands, large containers and what belongs to libraries are left out.

    Args:
        code: functions, classes and other callables.
    """

    def __init__(self, code: Iterable[Any] = ()) -> None:
        self._places: dict[int, tuple[Any, dict[Any, Any]]] = {}  # by id: the place, and what it held by key
        self._changed: list[tuple[Any, Any, Any]] = []  # places that held what they shall not, their owners, keys
        left = collections.deque((value, 0) for value in code)
        seen: set[int] = set()
        while left and len(self._places) < _MAX_PLACES:
            value, depth = left.popleft()
            if id(value) not in seen and depth < _DEPTH:
                seen.add(id(value))
                left.extend((inside, depth + 1) for inside in self._remember(value) if not isinstance(inside, _DULL))

    def _remember(self, value: Any) -> Iterable[Any]:
        """Remember what a thing holds; return what to look into next."""
        kind = type(value)
        if kind is types.FunctionType:
            namespace = () if is_library(value.__module__) else (value.__globals__,)
            return (*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, *namespace)
        if issubclass(kind, types.ModuleType):
            return () if is_library(value.__name__) else (vars(value),)
        if kind is types.MethodType:
            return value.__func__, value.__self__
        if kind is functools.partial:
            return value.func, value.args, value.keywords
        if issubclass(kind, threading.local):
            return (value.__dict__,)  # this thread's
        if issubclass(kind, _LRU):
            return (value.__wrapped__,)
        if isinstance(value, type):
            return self._remember_class(value)
        if issubclass(kind, tuple):
            return value if len(value) <= _MAX_ITEMS else ()
        held = held_by(value)
        if held is None or (len(held) > _MAX_ITEMS and not is_namespace(value)):
            return ()
        self._places[id(value)] = value, held
        attributes = getattr(value, "__dict__", None)
        if attributes is not None:  # which may be what the collector finds to hold an attribute
            self._places[id(attributes)] = attributes, held
        return held.values()

    def _remember_class(self, kind: type) -> Iterable[Any]:
        module = sys.modules.get(kind.__module__)
        if module is None or is_library(kind.__module__):
            return ()
        attributes = class_attributes(kind)
        self._places[id(attributes)] = attributes, dict(attributes)
        return vars(module), *attributes.values()

    def knows(self, place: Any) -> bool:
        """True if it remembers what this place held."""
        return id(place) in self._places

    def put_back(self, place: Any, value: Any, owner: Any = None) -> None:
        """Let a place hold what it held where it holds `value` now; nothing, if that is not known.

        What is missing is made again or an error; what is undefined would be a silently wrong number.

        Args:
            place: a container, a closure's cell or an object.
            value: what it shall no longer hold.
            owner: what the place belongs to; see `put`.
        """
        known = id(place) in self._places
        before = self._places[id(place)][1] if known else {}
        now = held_by(place) or {}
        keys = [key for key, item in now.items() if item is value][::-1]
        self._changed += [(place, owner, key) for key in keys]
        if known and (isinstance(place, collections.deque) or (isinstance(place, list) and len(now) < len(before))):
            place.clear()
            place.extend(before.values())
            return
        for key in keys:
            put(place, key, before.get(key, ABSENT), owner)

    def put_back_as(self, earlier: Surroundings) -> None:
        """Let the places where something was put back hold what they held even earlier."""
        for place, owner, key in self._changed:
            if id(place) not in earlier._places:
                continue
            before = earlier._places[id(place)][1]
            if isinstance(place, (collections.deque, list)):
                place.clear()
                place.extend(before.values())
            elif (held_by(place) or {}).get(key, ABSENT) is not before.get(key, ABSENT):
                put(place, key, before.get(key, ABSENT), owner)


def held_by(place: Any) -> dict[Any, Any] | None:
    """Return what a container, a cell or an object of a user's class holds, by key; None if it is none of these."""
    kind = type(place)
    if issubclass(kind, dict):
        return dict(dict.items(place))
    if issubclass(kind, (list, collections.deque)):
        base: Any = list if issubclass(kind, list) else collections.deque
        return dict(enumerate(base.__iter__(place)))
    if issubclass(kind, set):
        return {item: item for item in set.__iter__(place)}
    if kind is types.CellType:
        return dict(_contents(place))
    return dict(_attributes(place)) if _is_users(kind) else None


def _contents(cell: types.CellType) -> Iterator[tuple[str, Any]]:
    try:
        yield "", cell.cell_contents
    except ValueError:  # empty
        return


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(thing, "__dict__", {}).items()
    for base in type(thing).__mro__:
        for name, member in vars(base).items():
            if type(member) is types.MemberDescriptorType:
                value = getattr(thing, name, ABSENT)
                if value is not ABSENT:
                    yield name, value


def put(place: Any, key: Any, value: Any, owner: Any = None) -> None:
    """Let a place hold a value by a key, or nothing if it is `ABSENT`.

    Args:
        place: anything that `held_by` can read.
        key: as `held_by` gives it.
        value: what it shall hold there.
        owner: what the place belongs to; attributes of a class are changed through the class.
    """
    gone = value is ABSENT
    if isinstance(place, dict):
        base: Any = collections.OrderedDict if isinstance(place, collections.OrderedDict) else dict
        if isinstance(owner, type):  # else method lookups would go on with what they remember
            type.__delattr__(owner, key) if gone else type.__setattr__(owner, key, value)
        elif gone:
            base.__delitem__(place, key)
        else:
            base.__setitem__(place, key, value)
    elif isinstance(place, (list, collections.deque)):
        base = list if isinstance(place, list) else collections.deque
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)
    elif isinstance(place, set):
        set.discard(place, key)
    elif gone:
        object.__delattr__(place, key or "cell_contents")
    else:
        object.__setattr__(place, key or "cell_contents", value)


def class_attributes(kind: type) -> dict[str, Any]:
    """Return a class's own dict, as the garbage collector sees it."""
    return next(held for held in gc.get_referents(kind) if type(held) is dict)


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
def _is_users(kind: type) -> bool:
    code = (type, types.ModuleType, types.FunctionType)
    plain = kind.__module__ != "builtins" and not hasattr(kind, "__torch_function__") and not issubclass(kind, code)
    return plain and not is_library(kind.__module__)
