"""Sets and restores what belongs to others: the methods of a model, and the forwards of its modules."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

Forward = Callable[..., Any]
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


@contextlib.contextmanager
def other_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """In here these modules run these forwards when this thread calls them; a module is no argument of its own."""
    thread = threading.get_ident()
    taken = []
    try:
        for module, forward in forwards.items():
            attributes = vars(module)
            if "forward" not in attributes:  # else somebody gave it another
                attributes["forward"] = _Swapped(_forward, module, forward, thread)
                taken.append(attributes)
        yield
    finally:
        for attributes in taken:
            attributes.pop("forward", None)


class _Swapped(functools.partial[Any]):
    """A module's other forward; copies and pickles that are made meanwhile have the module's own."""

    def __reduce__(self) -> tuple[Any, ...]:
        module = self.args[0]
        return functools.partial, (type(module).forward, module)


def _forward(module: Any, forward: Forward, thread: int, *args: Any, **kwargs: Any) -> Any:
    if threading.get_ident() != thread:
        return type(module).forward(module, *args, **kwargs)
    return forward(*args, **kwargs)
