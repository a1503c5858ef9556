"""Mark eager breaks: calls that run between two segments of a captured forward instead of inside one.

A break is marked once, on a function, on modules by name, or by an operator's tag. The mark does
nothing by itself: only a piecewise capture of the thread, or the warmup before it, takes notice.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from simplegraph.base.break_operators import name_of, recorder_of
from simplegraph.base.errors import ConfigError
from simplegraph.base.patches import subclass

FunctionType = TypeVar("FunctionType", bound=Callable[..., Any])


def eager_break(function: FunctionType) -> FunctionType:
    """Run this function between two graph segments of a PIECEWISE capture, eagerly at every replay.

        @sg.eager_break
        def attention(q, k, v, metadata): ...

    In FULL mode, inside another break or a backward, and outside a capture it is a plain call. Tensors among the
    arguments are the graph's own memory: valid until the function returns, and not to be kept. Other objects are passed
    as they are, so what the function reads from them is read at every replay. Returned tensors are copied to
    where the next segment reads them, unless the function wrote into an argument and returns that (or nothing).
    The result must have the same structure, shapes and dtypes at every replay. In a padded batch the function sees
    the padded rows, too. What it leaves behind elsewhere for the forward to read keeps the size eager: return it.

    Args:
        function: a function or method; its Python code runs at every replay.

    Raises:
        ConfigError: it is a class, a module, or its body does not run when it is called (a generator, async).
    """
    _check_function(function)
    if getattr(function, "_simplegraph_break", False):
        return function

    @functools.wraps(function)
    def breaking(*args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(function)
        return function(*args, **kwargs) if recorder is None else recorder.call(function, args, kwargs)

    breaking._simplegraph_break = True  # type: ignore[attr-defined]
    return breaking  # type: ignore[return-value]


def _check_function(function: Any) -> None:
    if isinstance(function, (type, nn.Module)):
        got = (
            f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__} instance"
        )
        raise ConfigError(
            f"eager_break got {got}; expected a function. "
            'Mark its forward, or use simplegraph.break_at(model, "*.name").'
        )
    if isinstance(function, (staticmethod, classmethod)):
        raise ConfigError(f"eager_break got a {type(function).__name__}; put @{type(function).__name__} above it.")
    if not callable(function):
        raise ConfigError(f"eager_break got {function!r}; expected a function.")
    body = function.func if isinstance(function, functools.partial) else function
    for deferred in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        if deferred(body) or deferred(getattr(body, "__call__", None)):  # noqa: B004
            raise ConfigError(
                f"eager_break got {name_of(function)}, a generator or async function, whose body would run after the "
                "break; break in a plain function that returns its result."
            )


def break_at(module: nn.Module, *patterns: str) -> list[str]:
    """Make every call of the matching submodules an eager break: for models whose code is not ours.

        sg.break_at(model, "*.self_attn")

    The whole call breaks, hooks included. Copies and pickles of the module keep their breaks, unless
    its class makes them in its own way (`__deepcopy__`, torch.fx). Graphs captured before
    are not changed: mark first.

    Args:
        module: the model; changed in place.
        *patterns: shell patterns of names, as `named_modules` gives them.

    Returns:
        The names that matched, in the model's order.

    Raises:
        ConfigError: a pattern matches nothing, or it is no module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"break_at got {module!r}; expected a torch.nn.Module instance first.")
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"break_at got the patterns {patterns!r}; expected at least one, such as '*.self_attn'.")
    named = {name: child for name, child in module.named_modules(remove_duplicate=False) if name}
    matches = {pattern: fnmatch.filter(named, pattern) for pattern in patterns}
    for pattern, found in matches.items():
        if not found:
            kinds = ", ".join(sorted({"*." + name.rsplit(".", 1)[-1] for name in named})[:12])
            raise ConfigError(f"break_at: no submodule is named {pattern!r}; there are, among others, {kinds}.")
    names = [name for name in named if any(name in found for found in matches.values())]
    for name in names:
        if isinstance(named[name], torch.jit.ScriptModule):
            raise ConfigError(f"break_at: {name} is a TorchScript module; break at the Python module around it.")
    for name in names:
        kind: Any = type(named[name])
        if not hasattr(kind, "_simplegraph_unbroken"):
            named[name].__class__ = _breaking_class(kind)
    return names


@functools.cache
def _breaking_class(original: Any) -> type[nn.Module]:
    """A subclass whose call is a break, and that pickles by the original's name."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__call__(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        state = self.__getstate__() if hasattr(original, "__getstate__") else vars(self)
        return _rebuilt, (original,), state

    call.__qualname__ = original.__qualname__
    members = {"__call__": eager_break(call), "__reduce_ex__": reduce, "_simplegraph_unbroken": original}
    breaking: type[nn.Module] = subclass(original, members)
    return breaking


def _rebuilt(original: Any) -> Any:
    kind: Any = _breaking_class(original)
    return object.__new__(kind)
