"""Eager breaks: what runs between two segments of a captured forward instead of inside one.

A break is marked once, on a function, on modules by name, or by an operator's tag. The mark does
nothing by itself: only a piecewise capture of the thread, or the warmup before it, takes notice.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.library import Library, fallthrough_kernel

from simplegraph.errors import ConfigError

FunctionType = TypeVar("FunctionType", bound=Callable[..., Any])


class Recorder(Protocol):
    """Who is told of breaks.

    Attributes:
        operators: operators that break by themselves.
    """

    operators: frozenset[Any]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of a break; what it returns is what the forward goes on with."""


class _Active(threading.local):
    recorder: Recorder | None = None


_ACTIVE = _Active()


@contextlib.contextmanager
def told(recorder: Recorder | None) -> Iterator[None]:
    """Tell `recorder` of every break of this thread in here; None makes breaks plain calls."""
    before = _ACTIVE.recorder
    _ACTIVE.recorder = recorder
    try:
        with _operators_seen() if recorder is not None and recorder.operators else contextlib.nullcontext():
            yield
    finally:
        _ACTIVE.recorder = before


def eager_break(function: FunctionType) -> FunctionType:
    """Run this function between two graph segments of a PIECEWISE capture, eagerly at every replay.

        @sg.eager_break
        def attention(q, k, v, metadata): ...

    In FULL mode, inside another break and outside a capture it is a plain call. Tensors among the arguments
    are the graph's own memory: valid until the function returns, and not to be kept. Other objects are passed as they
    are, so what the function reads from them is read at every replay. Returned tensors are copied to
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
        recorder = _ACTIVE.recorder
        if recorder is None:
            return function(*args, **kwargs)
        return recorder.call(function, args, kwargs)

    breaking._simplegraph_break = True  # type: ignore[attr-defined]
    return breaking  # type: ignore[return-value]


def _check_function(function: Any) -> None:
    if isinstance(function, (type, nn.Module)):
        raise ConfigError(
            f"eager_break got {_described(function)}; expected a function. "
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


def _described(target: Any) -> str:
    return f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__} instance"


def name_of(function: Any) -> str:
    """What reports and messages call a break."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    return getattr(function, "__qualname__", None) or str(function)


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
        child = named[name]
        if isinstance(child, torch.jit.ScriptModule):
            raise ConfigError(f"break_at: {name} is a TorchScript module; break at the Python module around it.")
    for name in names:
        child = named[name]
        if not hasattr(type(child), "_simplegraph_unbroken"):
            kind: Any = type(child)
            child.__class__ = _breaking_class(kind)
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
    namespace = {
        "__call__": eager_break(call),
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_simplegraph_unbroken": original,
    }
    breaking: type[nn.Module] = type(original)(original.__name__, (original,), namespace)
    return breaking


def _rebuilt(original: Any) -> Any:
    kind: Any = _breaking_class(original)
    return object.__new__(kind)


# Operators. A dispatch mode would see every operator of a forward, at several microseconds each, a thousand
# times a capture. A dispatch key that only some operators have a kernel for, and that a thread includes only
# while it captures, costs the others nothing.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._dispatch_key_parse(_KEY_NAME)
_Library: Any = Library  # typed loosely because torch leaves it untyped
_libraries: list[Any] = []
_intercepted: set[Any] = set()
_lock = threading.Lock()


@contextlib.contextmanager
def _operators_seen() -> Iterator[None]:
    with torch._C._IncludeDispatchKeyGuard(_KEY):
        yield


def breaking_operators(names: Sequence[str] = ()) -> frozenset[Any]:
    """Operators that break by themselves: those tagged ``torch.Tag.cudagraph_unsafe``, and these.

    Args:
        names: such as ``"mylib::attention"`` (all overloads) or ``"aten::sort.stable"``.

    Raises:
        ConfigError: no such operator is registered.
    """
    found = set(_tagged(len(torch._C._dispatch_get_all_op_names())))
    for name in names:
        overloads = _overloads(name)
        if not overloads:
            raise ConfigError(
                f"break_ops names {name!r}, but no such operator is registered; expected the form "
                "'namespace::name', of a library that is imported before the capture."
            )
        found.update(overloads)
    with _lock:
        for operator in found - _intercepted:
            _intercept(operator)
    return frozenset(found)


@functools.lru_cache(maxsize=1)
def _tagged(count: int) -> list[Any]:
    """Every registered operator with the tag; looked for again when the number of operators has changed."""
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)
    names = torch._C._dispatch_get_all_op_names() if tag is not None else []
    return [operator for name in names if tag in _tags(name) for operator in _overloads(name, exact=True)]


def _tags(name: str) -> Sequence[torch.Tag]:
    packet, _, overload = name.partition(".")
    found = torch._C._get_operation_overload(packet, overload)
    return found[2] if found is not None else ()


def _overloads(name: str, *, exact: bool = False) -> list[Any]:
    namespace, _, rest = name.partition("::")
    packet_name, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), packet_name)
        chosen = [overload or "default"] if overload or exact else packet.overloads()
        return [getattr(packet, one) for one in chosen]
    except (AttributeError, RuntimeError):
        return []


def _intercept(operator: Any) -> None:
    if not _intercepted:
        fallback = _Library("_", "IMPL")
        fallback.fallback(fallthrough_kernel, _KEY_NAME)
        _libraries.append(fallback)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = _ACTIVE.recorder
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            if recorder is None or operator not in recorder.operators:
                return operator(*args, **kwargs)
            return recorder.call(operator, args, kwargs)

    namespace, _, _ = operator._schema.name.partition("::")
    library = _Library(namespace, "IMPL")
    library.impl(operator, kernel, _KEY_NAME)
    _libraries.append(library)
    _intercepted.add(operator)
