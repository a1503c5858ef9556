"""Read objects of the user's without running their code: no property, no `__getattr__`, no faked `__class__`.

A kind is asked for by `type`, since `isinstance` reads `__class__`, which a mock fakes and a dead weak proxy lacks.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")
PROXIES = frozenset(weakref.ProxyTypes)
_DESCRIPTORS = frozenset({types.GetSetDescriptorType, types.MemberDescriptorType})


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

    return functools.wraps(function)(remembered)


def own_dict(thing: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes, past what its class makes of them; None if it has none."""
    read = _dict_reader(type(thing))
    return None if read is None else read(thing)


@by_class
def _dict_reader(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    member = class_member(kind, "__dict__")
    return member.__get__ if type(member) in _DESCRIPTORS else None  # else a property of the user's


def class_member(kind: type, name: str) -> Any:
    """Return what a class or its first base that has the name holds by it, unbound; None if none does."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def attribute_of(thing: Any, name: str, default: Any = None) -> Any:
    """Return an attribute as the object, or else its class, holds it; a property itself, a slot's value."""
    held = own_dict(thing) or {}
    if name in held:
        return held[name]
    member = class_member(type(thing), name)
    if member is None:
        return default
    if type(member) not in _DESCRIPTORS:
        return member
    try:
        return member.__get__(thing)
    except AttributeError:  # a slot that is not filled
        return default


def behind(thing: Any) -> Any:
    """Return what a weak proxy stands for, None if that is gone; anything else itself."""
    if type(thing) not in PROXIES:
        return thing
    try:
        return thing.__init__.__self__
    except Exception:  # a class that hides it
        return None
