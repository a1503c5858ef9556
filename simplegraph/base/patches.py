"""Every change this library makes to other people's classes and registries, and the way back; and subclasses.

While a capture runs, or an observer of one, and taken back at its end:

    torch.cuda.Event.record, wait      names the line that forked to a side stream (device.cuda.forks)
    JITFunction.run of Triton          shows its launches to a capture's observer (program.observe)
    torch.cuda.is_current_stream_capturing  true in the emulator's captures, too (device.emulator)
    torch.get_rng_state                refused in the emulator's captures (device.emulator)
    torch.overrides.has_torch_function  blind to an emulated capture (device.emulator)
    CompiledFxGraph.__call__           refuses compiled code in the emulator's captures (device.emulator)

While an audit is attached (doctor.attach):

    torch.cuda.CUDAGraph.capture_begin, capture_end, reset, replay  told to the audit, where torch has no hooks for it
    EmulatorDevice.begin, end; EmulatorSegment.reset, replay        the same on the emulator, which is ours

While something sleeps, on objects that graphs were given to, and taken back when they wake:

    _apply, load_state_dict, forward, ...  of modules, optimizers, managers: wake first, or refuse (sleeping.sleeper)

While a program is advised (doctor.advise):

    torch.nn.Module.__call__           counts outermost calls; a compiler sees torch's own
    methods of modules that make them  the same

From the first use that needs them on, for the rest of the process:

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

_changes: dict[str, tuple[int, Callable[[], object]]] = {}  # how many asked for each, and what takes it back
_lock = threading.Lock()
_ABSENT = object()


def replace(owner: Any, name: str, replacing: Callable[[Any], Any]) -> None:
    """Replace an attribute of somebody else's class or module by what `replacing` makes of it, if nobody has yet."""
    with _lock:
        label = _label(owner, name)
        holders, take_back = _changes.get(label, (0, bool))
        if not holders:
            own = vars(owner).get(name, _ABSENT)  # absent also where it is inherited
            take_back = functools.partial(setattr, owner, name, own)
            if own is _ABSENT:
                take_back = functools.partial(delattr, owner, name)
            original = getattr(owner, name)
            ours = replacing(original)
            if isinstance(ours, FunctionType):
                ours.__wrapped__ = original  # type: ignore[attr-defined]
            setattr(owner, name, ours)
        _changes[label] = holders + 1, take_back


def restore(owner: Any, name: str) -> None:
    """Give up what `replace` asked for: the last one puts the attribute back. Harmless where nothing was replaced."""
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
    """List what is replaced at the moment."""
    return list(_changes)


def replaced(value: Any) -> Any:
    """Return what a function of ours stands for, as users know it; everything else as it is."""
    while (
        type(value) is FunctionType
        and str(value.__module__).startswith("simplegraph.")
        and "__wrapped__" in vars(value)
    ):
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value


# Subclasses made at run time, which go by the original's name in messages, pickles and reprs.


def subclass(
    original: Any, members: dict[str, Any], *mixins: type, name: str | None = None, mark: str | None = None
) -> Any:
    """Make a subclass of `original` with these members, and with `mixins` before it.

    Args:
        original: any class.
        members: its own methods and attributes.
        *mixins: classes that come before the original in its method resolution order.
        name: another name for it.
        mark: a member. The subclass that was made before with the same value of it is returned, while there is one: a
            class knows its subclasses weakly, so neither is kept for the life of the process.
    """
    if mark is not None:
        for kind in type.__subclasses__(original):
            if vars(kind).get(mark) is members[mark]:
                return kind
    named = {attribute: getattr(original, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    return type(original)(name or original.__name__, (*mixins, original), named | members)


def plain(module: Any) -> Any:
    """Return the object that a wrapper was made around, as its forward sees it; others as they are.

    A class that was changed since by way of the wrapper, as for a parametrization, is the wrapper's alone.
    """
    return module._graph_original if "_graph_original" in vars(type(module)) else module
