"""Overrides and restores methods of a model, forwards of modules, and a registered attention function.

`masks` answers the questions that transformers asks about tensors while it makes a mask.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from simplegraph.base.patches import subclass

Forward = Callable[..., Any]
Method = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]


# Methods of a model: its class becomes a subclass of its own.


def original_class(model: Any) -> Any:
    """Return the class that a model had before its methods were overridden."""
    return getattr(type(model), "_simplegraph_overridden", type(model))


def override_methods(model: Any, owner: Any, methods: Mapping[str, Method]) -> None:
    """Make each method of the model call ``method(original, args, kwargs)``; an earlier owner gives way first.

    The model's attributes do not change, and its copies and pickles are of the original class.

    Args:
        model: any object.
        owner: the object that overrides the methods; has a method `give_way`, which restores the model.
        methods: method name -> the function to call instead.
    """
    earlier = getattr(type(model), "_simplegraph_owner", None)
    if earlier is not None:
        earlier.give_way()
    original: Any = type(model)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        _, _, *further = original.__reduce_ex__(self, max(protocol, 2))
        return object.__new__, (original,), *further  # `further` fills the new object

    members: dict[str, Any] = {name: _through(method, getattr(original, name)) for name, method in methods.items()}
    members |= {"_simplegraph_overridden": original, "_simplegraph_owner": owner}
    members["_simplegraph_members"] = (*members, "_simplegraph_members")
    model.__class__ = subclass(original, members | {"__reduce_ex__": reduce})


def restore_methods(model: Any, owner: Any) -> None:
    """Restore the methods of the model's original class if `owner` overrode them.

    A class that was derived since, by a library that changed the model in its own way, stays the model's.
    """
    classes = type(model).__mro__
    overriding: Any = next((kind for kind in classes if vars(kind).get("_simplegraph_owner") is owner), None)
    if overriding is None:
        return
    if overriding is type(model):
        model.__class__ = original_class(model)
    for name in overriding._simplegraph_members:  # classes derived from it have no graphs then
        delattr(overriding, name)


def _through(method: Method, original: Any) -> Forward:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(functools.partial(original, self), args, kwargs)

    return call


# Forwards and other methods of single objects, for one thread.


@contextlib.contextmanager
def override_forwards(forwards: Mapping[Any, Forward], name: str = "forward") -> Iterator[None]:
    """Make objects run these functions as their method when this thread calls it; they are not passed the object.

    Args:
        forwards: object, such as a module -> the function.
        name: of the method.
    """
    with contextlib.ExitStack() as stack:
        for thing, forward in forwards.items():
            if name not in vars(thing):  # else the user has replaced it
                vars(thing)[name] = _Override(thing, forward, name)
                stack.callback(vars(thing).pop, name, None)
        yield


class _Override:
    """An object's temporary method; copies and pickles of the object get its own one."""

    def __init__(self, thing: Any, forward: Forward, name: str) -> None:
        self._original, self._forward = functools.partial(getattr(type(thing), name), thing), forward
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._forward if threading.get_ident() == self._thread else self._original)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._original.func, *self._original.args)


# A function that transformers has registered, of attention or masks, for all threads.

_LOCK = threading.Lock()
_overriding: collections.Counter[Forward] = collections.Counter()


@contextlib.contextmanager
def override_registered(interface: Any, name: str, original: Forward, other: Forward) -> Iterator[None]:
    """Register `other` instead of `original` while any thread is in this context; a user's own function stays."""
    with _LOCK:
        _overriding[other] += 1
        _exchange(interface, name, original, other)
    try:
        yield
    finally:
        with _LOCK:
            _overriding[other] -= 1
            if not _overriding[other]:
                _exchange(interface, name, other, original)


def _exchange(interface: Any, name: str, expected: Forward, new: Forward) -> None:
    if interface()[name] is expected:
        interface.register(name, new)
