"""Find tensors of a capture that Python keeps outside the graph: in a global, a closure, a cache, anywhere.

A replay rewrites such memory, and until the first one it is undefined, so it means nothing to whoever keeps it.
"""

from __future__ import annotations

import gc
import itertools
import math
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.errors import EscapeError
from simplegraph.base.tensors import is_wrapper, parts
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.program.snapshot import Snapshot

_Found = tuple[weakref.ref[Tensor], int]  # a tensor, and where its memory began
_DEPTH = 4  # a class, its method, a function that it names, a class or file that this names: further on lie libraries
_MAX_OBJECTS = 100_000  # of a Program's own; far above what its breaks are passed
_NOT_HELD = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, nn.Module)


class PythonState:
    """Remembers what captures may change in Python's objects: what code can reach.

    Args:
        roots: modules, functions and other objects that captures run.
    """

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._roots = list(roots)
        self.snapshot = Snapshot()
        self.collected = False  # all garbage there was

    def remember(self) -> None:
        """Remember it as it is: what real runs changed stays."""
        self.snapshot = Snapshot(*self._roots, code=_DEPTH)

    def put_back(self) -> list[str]:
        """Put modules back as they were; returns the names of places that held memory of a graph."""
        return []

    def forget(self) -> None:
        """Remember nothing any more, so that nothing lives for that alone."""
        self.snapshot = Snapshot()

    def go_back_to(self, earlier: PythonState) -> None:
        """Put back, and remember from now on, what a copy of this remembered earlier."""
        earlier.put_back()
        self.snapshot.put_back_as(earlier.snapshot)
        vars(self).update(vars(earlier))


def refuse_escapes(
    device: GraphDevice,
    pool: GraphPool,
    label: str,
    *,
    own: Sequence[Any],
    state: PythonState,
    observed: Callable[[], Iterable[Tensor]],
) -> None:
    """Refuse a capture that left tensors of its graph in Python objects, and put back what these held.

    Memory that no tensor of Python owns belongs to a library, such as cuBLAS for its workspace.

    Args:
        device: where it was captured.
        pool: the memory it was captured into, as the last one.
        label: what was captured, for the message.
        own: what the Program holds; tensors in there stay.
        state: what Python's objects held before.
        observed: returns tensors that observers of the capture own.

    Raises:
        EscapeError: tensors were left.
    """
    if not device.left_alive(pool):
        return
    held = {_address(tensor) for tensor in (*_held_in(own), *observed())}
    if not device.left_alive(pool) - held:
        return
    gc.collect(0)  # a cycle is no escape
    kept = _tensors_at(device.left_alive(pool) - held)
    if kept and not state.collected:  # once: it takes longer than twenty captures
        state.collected = True
        gc.collect()
    if not _living(kept):
        return
    own_memory = {tensor.data_ptr() for tensor in _held_in(own)}
    returned = any(address in own_memory for _, address in kept)
    names, undefined = _put_back(kept, state)
    cause, remedy = kept_by(names), _RETURNED_REMEDY if returned else KEPT_REMEDY
    if undefined:
        remedy += f"\n  What {', '.join(undefined)} held before is not known: what hangs there now is undefined."
    raise EscapeError(f"capturing {label} failed\n  {cause}.\n  {remedy}", cause=cause)


def take_back(left: set[int], state: PythonState) -> None:
    """Put back what Python objects held where a capture that failed left tensors.

    Args:
        left: addresses of what it made and something owned; what the error's own frames hold stays there.
        state: what Python's objects held before.
    """
    kept = _tensors_at(left)
    if kept:
        _put_back(kept, state)


def _put_back(kept: Sequence[_Found], state: PythonState) -> tuple[list[str], Sequence[str]]:
    """Let places hold what they held; the names of those that held tensors, and of those that hold them still.

    Nothing is taken away from a place whose former content is not known. What such a place holds is undefined, and as
    NaN it shows.
    """
    names = state.put_back()
    found = _living(kept)
    if not found:
        return names, []
    names += [name for name in state.snapshot.release(found) if name not in names]
    found.clear()
    still = _living(kept)
    for tensor in still:
        if tensor.is_floating_point():
            tensor.detach().fill_(math.nan)
    return names, [_UNSEEN] if still else []


_UNSEEN = "a place that the code does not lead to"
KEPT_REMEDY = "Return it instead, or copy it into a buffer of the module."
_RETURNED_REMEDY = (
    "It is returned, too, and a replay, which runs no Python, would leave that of another size there: "
    "keep what the replay returns, where the forward was called."
)


def kept_by(names: Iterable[str]) -> str:
    """Say that places of these names would keep tensors of a graph."""
    return f"{', '.join(names) or _UNSEEN} would keep a tensor that exists only inside the graph"


def _held_in(own: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors in these objects, and in what they hold."""
    seen: set[int] = set()
    left = list(own)
    while left and len(seen) < _MAX_OBJECTS:
        value = left.pop()
        if id(value) in seen or isinstance(value, _NOT_HELD):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield from parts(value)
        elif isinstance(value, types.FunctionType):
            left += value.__closure__ or ()
        else:
            left += gc.get_referents(value)


def _tensors_at(addresses: set[int]) -> list[_Found]:
    """Find every tensor of Python that owns memory at one of these addresses; looks at all objects there are."""
    if not addresses:
        return []
    with torch._C.DisableTorchFunctionSubclass():
        things = gc.get_objects()
        kinds = {kind for kind in set(map(type, things)) if issubclass(kind, Tensor)}
        tensors = itertools.compress(things, map(kinds.__contains__, map(type, things)))  # there may be millions
        return [(weakref.ref(tensor), _address(tensor)) for tensor in tensors if _address(tensor) in addresses]


def _living(tensors: Iterable[_Found]) -> list[Tensor]:
    """Return the tensors that live, in the memory where they were found: a parameter may have its own again."""
    living = ((reference(), address) for reference, address in tensors)
    return [tensor for tensor, address in living if tensor is not None and _address(tensor) == address]


def _address(tensor: Tensor) -> int:
    """Return where the memory that a tensor owns begins, 0 if it owns none: borrowed memory cannot be resized."""
    if tensor.layout is not torch.strided or is_wrapper(tensor):
        return 0
    try:
        storage = tensor.untyped_storage()
        owned = storage.resizable() and storage.device.type != "meta"  # a fake one, which compilers keep, warns
        return storage.data_ptr() if owned else 0
    except (RuntimeError, NotImplementedError, ValueError):  # fake, functional or not initialised
        return 0
