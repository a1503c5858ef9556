"""Tells whether modules run what their libraries have written: nobody hooked them, or replaced a method."""

from __future__ import annotations

import functools
from typing import Any

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Methods that forwards of known classes call, and that fused ones do not.
_CONTINUOUS = ("_operate_on_continuous_inputs", "_get_output_for_continuous_inputs")
_INNER = ("_conv_forward", "_forward_impl", "_scale", "gelu", *_CONTINUOUS)
_NONE = (None,) * len(_INNER)


def plain_class(module: Any) -> Any:
    """Return the class that a module had before `optimize` changed it."""
    return getattr(type(module), "_simplegraph_plain", type(module))


def methods(module: Any) -> tuple[Any, ...]:
    """List what a forward of the module runs of its class, and what was set for this module instead."""
    kind, attributes = plain_class(module), vars(module)
    found = (*(getattr(kind, name, None) for name in _INNER), *map(attributes.get, _INNER))
    return kind.forward, *(each if callable(each) else None for each in found)  # others have such names for numbers


def runs_as_written(module: Any) -> bool:
    """True if a module has the methods of its class's library: none was replaced, in the class or for this module."""
    found = methods(module)
    return found[-len(_INNER) :] == _NONE and _are_written(plain_class(module), *found[: -len(_INNER)])


@functools.lru_cache(1024)
def _are_written(kind: type, *methods: Any) -> bool:
    return all(is_written(kind, method) for method in methods if method is not None)


def is_written(kind: type, method: Any) -> bool:
    """True if a method comes from the library of a class in which it is found: copied names do not make it so."""
    owner = next((each for each in kind.__mro__ if any(own is method for own in vars(each).values())), None)
    file = getattr(method, "__globals__", {}).get("__name__", "")
    return owner is not None and file.partition(".")[0] == owner.__module__.partition(".")[0]


def hooked(*modules: Any) -> bool:
    """True if a call of one of the modules is not its class's forward as the library has it; None is no module."""
    return any(map(_is_hooked, modules))


def _is_hooked(module: Any) -> bool:
    if module is None:
        return False
    attributes = vars(module)
    return "forward" in attributes or any(attributes[name] for name in _HOOKS) or not runs_as_written(module)
