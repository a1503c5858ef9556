"""Every change that this library makes to other people's classes and registries, and how it is undone; and subclasses.

While a capture or an observer of one runs, and undone at its end:

    torch.cuda.Event.record, wait      names the line that forked to a side stream (device.cuda.forks)
    JITFunction.run of Triton          shows its launches to a capture's observer (program.observe)
    torch.cuda.is_current_stream_capturing  true in the emulator's captures, too (device.emulator)
    torch.get_rng_state                refused in the emulator's captures (device.emulator)
    torch.overrides.has_torch_function  blind to an emulated capture (device.emulator)
    Optimizer._..._graph_capture_health_check  asks nothing in the emulator's captures (device.emulator)
    CompiledFxGraph.__call__           refuses compiled code in the emulator's captures (device.emulator)

While an audit is attached (doctor.attach):

    torch.cuda.CUDAGraph.capture_begin, capture_end, reset, replay  told to the audit, where torch has no hooks for it
    EmulatorDevice.begin, end; EmulatorSegment.reset, replay        the same on the emulator, which is ours

While something sleeps, on objects that graphs were given to, and undone when they wake:

    _apply, load_state_dict, forward, ...  of modules, optimizers, managers: wake first, or refuse (sleeping.sleeper)

While a program is advised (doctor.advise):

    torch.nn.Module.__call__           counts outermost calls; a compiler sees torch's own
    methods of modules that make them  the same

From the first use that needs them, for the rest of the process:

    bases of a class under @cuda_graph  `CudaGraphWrapper` comes first, and leaves those of its subclasses (serve.wrap)
    break operators                    kernels on a spare dispatch key, so that they can break (program.breaks.marks)
    is_tracing of transformers, ...    see integrations.transformers.masks
    AttentionInterface of transformers  attention without copies of keys, in captured steps (integrations.transformers)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

_changes: dict[str, tuple[int, Callable[[], object]]] = {}  # how many callers made each, and a function that undoes it
_lock = threading.Lock()
_ABSENT = object()
_PACKAGE = f"{__package__.partition('.')[0]}."


def replace(owner: Any, name: str, replacing: Callable[[Any], Any]) -> None:
    """Replace an attribute of other people's class or module by `replacing` of it, if it is not replaced yet."""
    with _lock:
        label = _label(owner, name)
        holders, take_back = _changes.get(label, (0, bool))
        if not holders:
            own_member = vars(owner).get(name, _ABSENT)  # also absent if it is inherited
            take_back = functools.partial(setattr, owner, name, own_member)
            if own_member is _ABSENT:
                take_back = functools.partial(delattr, owner, name)
            original = getattr(owner, name)
            ours = replacing(original)
            if isinstance(ours, FunctionType):
                ours.__wrapped__ = original  # type: ignore[attr-defined]
            setattr(owner, name, ours)
        _changes[label] = holders + 1, take_back


def restore(owner: Any, name: str) -> None:
    """Undo one `replace`; the last one restores the attribute. Does nothing if it was not replaced."""
    with _lock:
        label = _label(owner, name)
        holders, take_back = _changes.pop(label, (0, bool))
        if holders > 1:
            _changes[label] = holders - 1, take_back
        else:
            take_back()


def _label(owner: Any, name: str) -> str:
    module = "" if isinstance(owner, ModuleType) else f"{owner.__module__}."
    return f"{module}{getattr(owner, '__qualname__', owner.__name__)}.{name}"


def installed() -> list[str]:
    """List the attributes that are replaced at the moment."""
    return list(_changes)


class Door(functools.partial[Any]):
    """A call that stands in front of a method of somebody's object for a while. It is no value of that object."""


def replaced(value: Any) -> Any:
    """Return the original of a function that this library replaced; any other value itself."""
    while type(value) is FunctionType and str(value.__module__).startswith(_PACKAGE) and "__wrapped__" in vars(value):
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value


# Subclasses made at run time, which have the original's name in messages, pickles and reprs.


def subclass(
    original: Any, members: dict[str, Any], *mixins: type, name: str | None = None, mark: str | None = None
) -> Any:
    """Make a subclass of `original` with these members, and with `mixins` before it.

    Args:
        original: any class.
        members: its own methods and attributes.
        *mixins: classes that come before the original in its method resolution order.
        name: another name for it.
        mark: the name of a member. If a subclass with the same value of this member exists, it is returned. A class
            refers to its subclasses weakly, so no subclass is kept for the life of the process.
    """
    if mark is not None:
        for kind in type.__subclasses__(original):
            if vars(kind).get(mark) is members[mark]:
                return kind
    named = {attribute: getattr(original, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    return type(original)(name or original.__name__, (*mixins, original), named | members)


def plain(module: Any) -> Any:
    """Return the object that a wrapper was made around, which is its forward's `self`; other objects themselves.

    A wrapper whose class was changed since, such as by a parametrization, keeps that class for itself.
    """
    return module._graph_original if "_graph_original" in vars(type(module)) else module
