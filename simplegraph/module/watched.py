"""Attributes and containers that note what a run reads of them before it writes it.

Not seen: reads past both, of an instance's ``__dict__`` or by C code. What an operator reads of the memory is.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from simplegraph.graph.places import ABSENT


class HeldPlace(NamedTuple):
    """A place below a module: an item of a dict or a list, or an attribute.

    Attributes:
        name: as `Snapshot.changes` gives it; all items of a list have one.
        holder: the container, or the dict of an object's attributes; key: by which it holds what is there.
        owner: the object whose attributes the holder has, None of a container.
        links: (container, key, value) of everything on the way from the holder up to a module.
    """

    name: str
    holder: Any
    key: Any
    owner: Any
    links: tuple[tuple[Any, Any, Any], ...]


_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of classes: made by Python code, and not to be changed


def is_watchable(place: HeldPlace) -> bool:
    """True if reads of a place can be noticed."""
    if place.owner is None:
        # Another container stands for it while a run is watched.
        return type(place.holder) in WATCHED and isinstance(place.links[0][0], (dict, list))
    kind: Any = type(place.owner)
    found = next((vars(base)[place.key] for base in kind.__mro__ if place.key in vars(base)), None)
    plain = kind.__getattribute__ is object.__getattribute__ and cast(Any, type(kind)).__setattr__ is type.__setattr__
    plain = plain and kind.__flags__ & (_HEAP | _IMMUTABLE) == _HEAP
    return plain and isinstance(place.key, str) and not hasattr(found, "__set__") and not hasattr(found, "__delete__")


class WatchedAttribute:
    """An attribute of a class, for the time of a run, that notes which instances it was read of before it was set.

    Attributes:
        read: their ids, and of those that another thread set; written: of those that it was set of.
    """

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name
        self._before = vars(kind).get(name, ABSENT)
        self._thread = threading.get_ident()
        self.written: set[int] = set()
        self.read: set[int] = set()

    def __enter__(self) -> None:
        type.__setattr__(self._kind, self._name, self)

    def __exit__(self, *exc_info: object) -> None:
        if self._before is ABSENT:
            type.__delattr__(self._kind, self._name)
        else:
            type.__setattr__(self._kind, self._name, self._before)

    def __get__(self, thing: Any, kind: Any = None) -> Any:
        if thing is not None:
            if threading.get_ident() == self._thread and id(thing) not in self.written:
                self.read.add(id(thing))
            if self._name in vars(thing):
                return vars(thing)[self._name]
        mro = (kind or type(thing)).__mro__
        for base in mro[mro.index(self._kind) :]:  # the classes before it have none, or watch it, too
            found = self._before if base is self._kind else vars(base).get(self._name, ABSENT)
            if found is not ABSENT:
                return found.__get__(thing, kind) if hasattr(type(found), "__get__") else found
        raise AttributeError(f"{type(thing).__name__!r} object has no attribute {self._name!r}")

    def __set__(self, thing: Any, value: Any) -> None:
        ours = threading.get_ident() == self._thread
        (self.written if ours else self.read).add(id(thing))
        vars(thing)[self._name] = value

    def __delete__(self, thing: Any) -> None:
        self.__get__(thing)
        del vars(thing)[self._name]


_LEFT_ALONE = frozenset(dir(object)) - {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__"}


def _watched(base: Any) -> Any:
    """Make a class of containers that note which items are read before they are set."""

    def set_item(self: Any, key: Any, value: Any) -> None:
        if isinstance(key, slice) or threading.get_ident() != self.thread:
            self.read |= self.every_key()
        self.written.add(self.key_of(key))
        base.__setitem__(self, key, value)

    def get_item(self: Any, key: Any) -> Any:
        self.read |= self.keys_of() if isinstance(key, slice) else {self.key_of(key)} - self.written
        return base.__getitem__(self, key)

    def other(method: Any) -> Any:
        @functools.wraps(method)
        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.read |= self.keys_of()
            return method(self, *args, **kwargs)

        return noted

    names = [name for name, value in vars(base).items() if callable(value) and name not in _LEFT_ALONE]
    namespace: dict[str, Any] = {name: other(getattr(base, name)) for name in names}
    namespace |= {"__setitem__": set_item, "__getitem__": get_item, "__class_getitem__": None}
    return type(f"_Watched{base.__name__.title()}", (_Watched, base), namespace)


class _Watched:
    """Base of the watched containers."""

    def __init__(self, items: Any) -> None:
        self.thread = threading.get_ident()
        self.written: set[Any] = set()
        self.read: set[Any] = set()
        self._fill(items)

    def _fill(self, items: Any) -> None:
        base: Any = type(self).__mro__[2]
        base.__init__(self, items)

    def key_of(self, key: Any) -> Any:
        """Return the key by which an item is known; an index counts from the front."""
        return key + list.__len__(self) if isinstance(self, list) and isinstance(key, int) and key < 0 else key

    def every_key(self) -> set[Any]:
        """Return all keys."""
        return set(range(list.__len__(self)) if isinstance(self, list) else dict.keys(cast("dict[Any, Any]", self)))

    def keys_of(self) -> set[Any]:
        """Return all keys that were not written."""
        return self.every_key() - self.written


WATCHED: dict[type, Any] = {dict: _watched(dict), list: _watched(list)}


@contextlib.contextmanager
def swapped(place: HeldPlace, watched: Any) -> Iterator[None]:
    """Let a watched container stand for another one, which afterwards holds what that one holds.

    What is written meanwhile to the other one itself, since something else holds it too, stays and counts as read.
    """
    holder, key, container = place.links[0]
    if holder[key] is not container:
        yield
        return
    before = _items(watched)
    holder[key] = watched
    try:
        yield
    finally:
        if holder[key] is watched:
            holder[key] = container
        now, own = _items(watched), _items(container)
        written_past = {name for name in before | own if own.get(name, ABSENT) is not before.get(name, ABSENT)}
        if written_past:
            watched.read |= before.keys() | own.keys()
            now = {name: item for name, item in now.items() if name not in written_past}
            now |= {name: own[name] for name in own if name in written_past}
        if isinstance(container, list):
            container[:] = now.values()
        else:
            for name in own.keys() - now.keys():
                del container[name]
            container.update(now)
        type(container).clear(watched)  # it may outlive the run


def _items(container: Any) -> dict[Any, Any]:
    """Return what a dict or a list holds, by key, read past what watches it."""
    return dict(enumerate(list.__iter__(container)) if isinstance(container, list) else dict.items(container))
