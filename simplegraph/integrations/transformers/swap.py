"""Other methods for one model: its class becomes a subclass of its own, and can be put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Method = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def owner_of(model: Any) -> Any:
    """Who gave the model other methods; None if nobody did."""
    return getattr(type(model), "_simplegraph_owner", None)


def give_methods(model: Any, owner: Any, methods: dict[str, Method]) -> None:
    """Let each method of the model call ``method(original, args, kwargs)`` from now on.

    The model itself holds nothing of it, so that whoever looks through its attributes finds what was there; copies
    and pickles are of the original class.
    """
    original: Any = type(model)

    def reduce(self: Any, protocol: Any = None) -> tuple[Any, ...]:
        _, _, *rest = original.__reduce_ex__(self, max(protocol, 2))
        return _blank, (original,), *rest

    namespace: dict[str, Any] = {name: _through(method, getattr(original, name)) for name, method in methods.items()}
    namespace |= {
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_simplegraph_original": original,
        "_simplegraph_owner": owner,
    }
    model.__class__ = type(original)(original.__name__, (original,), namespace)


def take_back(model: Any, owner: Any) -> None:
    """Let the model be of its original class again, if it is `owner` that changed it."""
    if owner_of(model) is owner:
        model.__class__ = type(model)._simplegraph_original


@functools.cache
def named(kind: Any, name: str) -> Any:
    """A class by the model's name, which messages and the report then call its instances."""
    return type(name, (kind,), {})


def _through(method: Method, original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(functools.partial(original, self), args, kwargs)

    return call


def _blank(kind: Any) -> Any:
    """What a copy of a model is filled into."""
    return kind.__new__(kind)
