"""The recorder of breaks that is active in a thread, and operators that break by themselves."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch


class BreakRecorder(Protocol):
    """Is called for every break that a thread meets.

    Attributes:
        operators: operators that break by themselves.
    """

    operators: frozenset[Any]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of a break, and return what the forward goes on with."""


class _ThreadBreaks(threading.local):
    recorder: BreakRecorder | None = None
    inlined: frozenset[Any] = frozenset()


ACTIVE = _ThreadBreaks()


def recorder_of(function: Any) -> BreakRecorder | None:
    """Return what is to be told of a call of this break; None if it is a plain call.

    It is one in a backward that the forward runs: on a GPU that runs in a thread of its own, which ends no segment.
    """
    recorder = ACTIVE.recorder
    if recorder is None or function in ACTIVE.inlined or torch._C._current_graph_task_id() >= 0:
        return None
    return recorder


@contextlib.contextmanager
def recording_breaks(recorder: BreakRecorder | None) -> Iterator[None]:
    """Tell `recorder` of every break of this thread in here; None makes breaks plain calls."""
    before = ACTIVE.recorder
    ACTIVE.recorder = recorder
    try:
        seen = recorder is not None and recorder.operators
        with torch._C._IncludeDispatchKeyGuard(_KEY) if seen else contextlib.nullcontext():
            yield
    finally:
        ACTIVE.recorder = before


@contextlib.contextmanager
def inlining(functions: Collection[Any]) -> Iterator[None]:
    """Make these functions and operators plain calls in here, whatever marks they have."""
    before, ACTIVE.inlined = ACTIVE.inlined, frozenset(functions)
    try:
        yield
    finally:
        ACTIVE.inlined = before


# A dispatch mode would see every operator of a forward, at several microseconds each, a thousand
# times a capture. A dispatch key that only some operators have a kernel for, and that a thread includes only
# while it captures, costs the others nothing.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._dispatch_key_parse(_KEY_NAME)
_library: Any = torch.library  # typed loosely because torch leaves it untyped
_libraries: list[Any] = []  # whose kernels end with them
_intercepted: set[Any] = set()
_lock = threading.Lock()


def breaking_operators() -> frozenset[Any]:
    """Return the operators that break by themselves: those tagged ``torch.Tag.cudagraph_unsafe``."""
    found = _tagged(frozenset(torch._C._dispatch_get_all_op_names()))
    with _lock:
        for operator in found - _intercepted:
            _intercept(operator)
    return found


@functools.lru_cache(maxsize=1)
def _tagged(names: frozenset[str]) -> frozenset[Any]:
    """Pick the operators with the tag; each name takes microseconds, so the last answer is kept."""
    found: set[Any] = set()
    for name in names:
        packet, _, overload = name.partition(".")
        operation = torch._C._get_operation_overload(packet, overload)
        if operation is not None and _UNSAFE in operation[2]:
            found.update(_overload(name))
    return frozenset(found)


_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)


def _overload(name: str) -> list[Any]:
    """Find the operator of a registered name, such as ``aten::sort.stable``; empty if Python cannot call it."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    try:
        return [getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")]
    except (AttributeError, RuntimeError):
        return []


def _intercept(operator: Any) -> None:
    if not _intercepted:
        fallback = _library.Library("_", "IMPL")
        fallback.fallback(_library.fallthrough_kernel, _KEY_NAME)
        _libraries.append(fallback)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(operator)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            if recorder is None or operator not in recorder.operators:
                return operator(*args, **kwargs)
            return recorder.call(operator, args, kwargs)

    namespace, _, _ = operator._schema.name.partition("::")
    library = _library.Library(namespace, "IMPL")
    library.impl(operator, kernel, _KEY_NAME)
    _libraries.append(library)
    _intercepted.add(operator)


def name_of(function: Any) -> str:
    """Name a break for reports and messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    return getattr(function, "__qualname__", None) or str(function)
