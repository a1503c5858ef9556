"""Sets what belongs to others and puts it back: methods of a model, forwards of modules, a registered attention.

No other file of this folder changes an object of torch's, of transformers' or of a user's.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers.modeling_utils import AttentionInterface

from simplegraph.graph import patches
from simplegraph.graph.subclass import subclass

Forward = Callable[..., Any]
Method = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]


# Methods of a model: its class becomes a subclass of its own.


def original_class(model: Any) -> Any:
    """Return the class that a model had before its methods were overridden."""
    return getattr(type(model), "_simplegraph_original", type(model))


def override_methods(model: Any, owner: Any, methods: Mapping[str, Method]) -> None:
    """Let each method of the model call ``method(original, args, kwargs)``, and remove who did so before.

    The model's attributes stay as they are, and copies and pickles of it are of the original class.

    Args:
        model: any object.
        owner: who overrides them, with a method `remove`.
        methods: what to call instead, by name.
    """
    earlier = getattr(type(model), "_simplegraph_owner", None)
    if earlier is not None:
        earlier.remove()
    original: Any = type(model)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        _, _, *rest = original.__reduce_ex__(self, max(protocol, 2))
        return object.__new__, (original,), *rest  # which is filled with what the rest tells

    members: dict[str, Any] = {name: _through(method, getattr(original, name)) for name, method in methods.items()}
    members |= {"__reduce_ex__": reduce, "_simplegraph_original": original, "_simplegraph_owner": owner}
    model.__class__ = subclass(original, members)


def restore_methods(model: Any, owner: Any) -> None:
    """Give the model its original class back, if it is `owner` that overrode its methods."""
    if getattr(type(model), "_simplegraph_owner", None) is owner:
        model.__class__ = original_class(model)


def _through(method: Method, original: Any) -> Forward:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(functools.partial(original, self), args, kwargs)

    return call


# Forwards of modules, for one thread.


@contextlib.contextmanager
def override_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Let modules run these forwards when this thread calls them; a module is no argument of its own."""
    taken = []
    try:
        for module, forward in forwards.items():
            attributes = vars(module)
            if "forward" not in attributes:  # else somebody gave it another
                attributes["forward"] = _Override(module, forward)
                taken.append(attributes)
        yield
    finally:
        for attributes in taken:
            attributes.pop("forward", None)


class _Override:
    """A module's other forward; copies and pickles that are made meanwhile have the module's own."""

    def __init__(self, module: Any, forward: Forward) -> None:
        self._own, self._forward = functools.partial(type(module).forward, module), forward
        self._thread = threading.get_ident()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._forward if threading.get_ident() == self._thread else self._own)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._own.func, *self._own.args)


# An attention function that transformers has registered, for all threads.

_LOCK = threading.Lock()
_overriding: collections.Counter[Forward] = collections.Counter()


@contextlib.contextmanager
def override_attention(name: str, original: Forward, other: Forward) -> Iterator[None]:
    """Register `other` in place of `original` while any thread is in here; what a user registered stays."""
    label = f"transformers' attention function {name}, by {other.__qualname__}"
    with _LOCK:
        _overriding[other] += 1
        _exchange(name, original, other)
        patches.record(label, lambda: _exchange(name, other, original))
    try:
        yield
    finally:
        with _LOCK:
            _overriding[other] -= 1
            if not _overriding[other]:
                patches.undo(label)


def _exchange(name: str, expected: Forward, new: Forward) -> None:
    if AttentionInterface()[name] is expected:
        AttentionInterface.register(name, new)
