"""Read users' objects without running their code, such as properties and `__getattr__`.

Classes are read by `type`, since `isinstance` reads `__class__`, which a mock fakes and an ended weak proxy lacks.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Answer = TypeVar("_Answer")
PROXIES = frozenset(weakref.ProxyTypes)
# Equal for the same object only, like `id`, but faster: from Python 3.12 on, `id` raises an audit event.
identity_hash = object.__hash__
_DESCRIPTORS = frozenset({types.GetSetDescriptorType, types.MemberDescriptorType})


def by_class(function: Callable[[type], _Answer]) -> Callable[[type], _Answer]:
    """Cache a function's results by class, for as long as each class lives.

    A cache that keeps classes alive could keep objects alive, since a class that was made for an object may hold it.
    """
    answers: dict[int, tuple[_Answer, weakref.ref[type]]] = {}

    def remembered(kind: type) -> _Answer:
        entry = answers.get(number := id(kind))
        if entry is None:
            gone = weakref.ref(kind, lambda _: answers.pop(number, None))
            entry = answers[number] = function(kind), gone
        return entry[0]

    return functools.wraps(function)(remembered)


def own_dict(thing: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes, whatever ``__dict__`` its class defines; None if it has none."""
    read = _dict_reader(type(thing))
    return None if read is None else read(thing)


@by_class
def _dict_reader(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    member = class_member(kind, "__dict__")
    return member.__get__ if type(member) in _DESCRIPTORS else None  # else a user's property


def class_member(kind: type, name: str) -> Any:
    """Return a member of a class or its bases by name, unbound; None if none has it."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def attribute_of(thing: Any, name: str, default: Any = None) -> Any:
    """Return an attribute from the object's dict or a slot, or else from its class (a property object itself)."""
    attributes = own_dict(thing) or {}
    if name in attributes:
        return attributes[name]
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
    """Return the target of a weak proxy, or None if it is gone; return any other object itself."""
    if type(thing) not in PROXIES:
        return thing
    try:
        return thing.__init__.__self__
    except Exception:  # a class that hides it
        return None


_NORMS = ("torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm")


def is_set_by_hook(module: Any, attribute: str) -> bool:
    """True if a hook of torch's old `weight_norm` or `spectral_norm` sets this attribute of a module at each call."""
    hooks = getattr(module, "_forward_pre_hooks", {}).values()
    return any(type(hook).__module__ in _NORMS and getattr(hook, "name", "") == attribute for hook in hooks)


def class_dict(kind: type) -> Any:
    """Return the dict of a class, which has a version, instead of the view that `vars` returns."""
    inner = gc.get_referents(vars(kind))
    return inner[0] if len(inner) == 1 and type(inner[0]) is dict else dict(vars(kind))
