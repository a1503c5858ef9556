"""All changes that this library makes to other libraries' classes and registries, made and undone here; subclasses.

During a capture or an observed run:

    torch.cuda.Event.record, wait      names the line that forked to a side stream (device.cuda.forks)
    JITFunction.run of Triton          shows launches to the observer of a run (program.observe)
    torch.cuda.is_current_stream_capturing  also True in the emulator's captures (device.emulator)
    torch.get_rng_state                refused in the emulator's captures (device.emulator)
    torch.overrides.has_torch_function  ignores the mode of an emulated capture (device.emulator)
    Optimizer._..._graph_capture_health_check  does nothing in the emulator's captures (device.emulator)
    CompiledFxGraph.__call__           refuses compiled code in the emulator's captures (device.emulator)

While an audit is attached (doctor.attach):

    torch.cuda.CUDAGraph.capture_begin, capture_end, reset, replay  notify the audit, if torch has no hooks for it
    EmulatorDevice.begin, end; EmulatorSegment.reset, replay        the same on the emulator

While graphs sleep, on their objects:

    _apply, load_state_dict, forward, ...  of modules, optimizers, managers: wake first, or refuse (sleeping.sleeper)

While a program is advised (doctor.advise):

    torch.nn.Module.__call__           counts outermost calls; a compiler sees torch's own
    methods of modules that make them  the same

From their first use until the end of the process:

    bases of a class under @cuda_graph  `CudaGraphWrapper` becomes the first base (serve.wrap)
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

_changes: dict[str, tuple[int, Callable[[], object]]] = {}  # the number of callers of each change, and its undo
_lock = threading.Lock()
_ABSENT = object()
_PACKAGE = f"{__package__.partition('.')[0]}."


def replace(owner: Any, name: str, replacing: Callable[[Any], Any]) -> None:
    """Replace an attribute of a class or module by `replacing(original)`, unless it is replaced already."""
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
    """Temporarily replaces a method of an object; guards do not count it as a value of the object."""


def replaced(value: Any) -> Any:
    """Return the original of a function that this library replaced; return any other value itself."""
    while type(value) is FunctionType and str(value.__module__).startswith(_PACKAGE) and "__wrapped__" in vars(value):
        value = value.__wrapped__  # type: ignore[attr-defined]
    return value


# Subclasses that are made at run time, and have the original's name in messages, pickles and reprs.


def subclass(
    original: Any, members: dict[str, Any], *mixins: type, name: str | None = None, mark: str | None = None
) -> Any:
    """Make a subclass of `original` with these members, and with `mixins` before it.

    Args:
        original: any class.
        members: its own methods and attributes.
        *mixins: classes that come before the original in its method resolution order.
        name: the name of the subclass, if it differs from the original's.
        mark: the name of a member. An existing subclass with the same value of this member is returned. A class refers
            to its subclasses weakly, so subclasses are not kept alive.
    """
    if mark is not None:
        for kind in type.__subclasses__(original):
            if vars(kind).get(mark) is members[mark]:
                return kind
    named = {attribute: getattr(original, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    return type(original)(name or original.__name__, (*mixins, original), named | members)


def original_of(module: Any) -> Any:
    """Return the original of a wrapper, which is the `self` of its forward; return other objects themselves.

    If the class of the wrapper was changed since, as by a parametrization, the wrapper itself is returned.
    """
    return module._graph_original if "_graph_original" in vars(type(module)) else module
