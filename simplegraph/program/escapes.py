"""Find changes that captures made in Python objects, and undo them.

A capture is refused if a tensor of it escapes: if Python keeps it outside the graph, in a global, a closure, a cache or
anywhere else. Each replay overwrites such a tensor, and before the first replay its values are undefined.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from simplegraph.base.errors import EscapeError
from simplegraph.base.failures import remedy_for_library
from simplegraph.base.objects import is_set_by_hook
from simplegraph.base.tensors import has_address, is_wrapper, parts
from simplegraph.base.walk import Policy, Walk, all_tensors, referring_kind, tensors_in
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.program.probes import Probe, RecordedRun, Run, Undone
from simplegraph.program.snapshot import DoneFlag, Snapshot, in_memory

_Located = tuple[weakref.ref[Tensor], int]  # a tensor, and the address of its memory
_GRACE = 20  # ms for other threads to release a tensor


class MakesMemory(Protocol):
    """A run that knows the memory that it made, such as a `Run` or an observer."""

    @property
    def made(self) -> Callable[[Tensor], bool]:
        """Return a function that is true for a tensor in memory that the run made."""


class PythonState(Probe):
    """Saves the Python state that captures may change: everything that their code can reach.

    Args:
        roots: the modules, functions and other objects that captures run.

    Attributes:
        kept_remedy: the default advice for a place that would keep a tensor.
    """

    kept_remedy = "Return it instead, or copy it into a buffer of the module."

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._roots = list(roots)
        self.snapshot = Snapshot()
        self.collected = False  # a full garbage collection was made
        # By place and key, the done flags of runs that were undone, in this pass of captures and in the pass before.
        self._flags: dict[tuple[int, Any], DoneFlag] = {}
        self._flags_before: dict[tuple[int, Any], DoneFlag] = {}
        self._by_recordings: set[tuple[int, Any]] = set()  # the done flags that a recording set
        self._recorded = False  # a recording ended, and its done flags are still set
        self._earlier: PythonState | None = None  # the saved state before a second try

    def before_captures(self, *, again: bool = False) -> None:
        """Save the present state; changes that real runs made stay."""
        self.put_back_flags()  # the flags of a run that was undone
        if not again:
            self._flags_before, self._flags = self._flags, {}
            self._by_recordings.clear()
        self.snapshot = Snapshot(*self._roots, code=True)

    def after_recording(self, recorded: RecordedRun) -> None:
        """Refuse a capture that left tensors of its graph in Python objects, and restore these objects.

        Memory that no Python tensor owns belongs to a library, such as a workspace of cuBLAS, and does not count.

        Raises:
            EscapeError: the capture left tensors.
        """
        self._recorded = True
        if not recorded.searched:
            return
        device, pool, program_holds = recorded.device, recorded.pool, recorded.held
        if not device.left_alive(pool):
            return
        owned_addresses = {_address(tensor) for tensor in (*_tensors_of(program_holds), *recorded.run.owned())}
        if not device.left_alive(pool) - owned_addresses:
            return
        gc.collect(0)  # a tensor in a reference cycle is no escape
        kept = _tensors_at(device.left_alive(pool) - owned_addresses)
        if kept and not self.collected:  # once, since it takes longer than twenty captures
            self.collected = True
            gc.collect()
        # Autograd's thread releases its last gradient shortly after `backward` has returned.
        for _ in range(_GRACE):
            if not _living(kept):
                return
            time.sleep(0.001)
        own_memory = {tensor.data_ptr() for tensor in _tensors_of(program_holds)}
        is_returned, is_gradient = any(address in own_memory for _, address in kept), _holds_gradient(_living(kept))
        names, undefined = _put_back(kept, self)
        if not (is_gradient or undefined):
            self.note_kept(recorded.run, names)
        remedy = self.remedy(names) if names else _UNSEEN_REMEDY
        if is_gradient or is_returned:
            remedy = _GRADIENT_REMEDY if is_gradient else _RETURNED_REMEDY
        cause = kept_by(names)
        if undefined:
            places = ", ".join(undefined)
            remedy += f"\n  The tensor stays in {places}, whose earlier content is not known; its values are undefined."
        raise EscapeError(f"capturing {recorded.run.label} failed\n  {cause}.\n  {remedy}", cause=cause)

    def note_kept(self, run: Run, names: Sequence[str]) -> None:
        """Note the places in which a recording left tensors, before it is refused."""

    def remedy(self, names: Iterable[str]) -> str:
        """Return the advice for places that would keep a tensor, given their names."""
        roots = [root for root in self._roots if isinstance(root, nn.Module)]
        for name, root in itertools.product(names, roots):
            owner, _, attribute = name.rpartition(".")
            if is_set_by_hook(dict(root.named_modules()).get(owner), attribute):
                return _NORM_REMEDY
            if library_remedy := remedy_for_library(root, name):
                return library_remedy
        return self.kept_remedy

    def undo(self, stage: Undone, runs: Sequence[Run]) -> None:
        """Undo the changes of a stage; after `SECOND_TRY`, continue from the state saved before it."""
        if stage is Undone.RUN:
            self.put_back_flags()
        elif stage is Undone.RECORDING:
            for run in runs:
                if kept := _tensors_at(run.left_addresses):  # tensors in the frames of the error stay
                    _put_back(kept, self)
        elif stage is Undone.RECORDINGS:
            self.put_back()
            self._earlier = copy.copy(self)
        elif self._earlier is not None:
            earlier, self._earlier = self._earlier, None
            earlier.put_back()
            earlier.release(runs)
            vars(self).update(vars(earlier))

    def inspect(self, capture: Any, summary: Any) -> Any:
        """Restore done flags that another thread set, and drop the saved state, which keeps objects alive."""
        if self._flags_before:
            for key in self._flags.keys() ^ self._flags_before.keys():
                flag = (self._flags_before | self._flags)[key]
                flag.exchange(flag.before, flag.now)
            self._flags, self._flags_before = {}, {}
        self.snapshot, self._earlier = Snapshot(), None
        return summary

    def put_back(self) -> list[str]:
        """Restore the modules; return the names of places that held graph memory."""
        return []

    def put_back_flags(self) -> None:
        """Reset done flags: they say that work is done, such as memory filled, and the work was undone."""
        flags = {(id(flag.place), flag.key): flag for flag in self.snapshot.take_done_flags()}
        self._flags = flags | self._flags
        self._by_recordings |= flags.keys() if self._recorded else set()
        self._recorded = False

    @property
    def sets_flags(self) -> bool:  # type: ignore[override]
        """True if recordings, or another thread meanwhile, set done flags."""
        return bool(self._by_recordings)

    def set_twice(self) -> list[str]:
        return sorted({self._flags[key].name for key in self._by_recordings & self._flags_before.keys()})

    def release(self, runs: Iterable[MakesMemory]) -> None:
        """Restore places that now hold tensors made by these runs."""
        self.snapshot.release(
            functools.partial(in_memory, lambda part: any(run.made(part) for run in runs)), caches=False
        )


def holds_graph_memory(value: Any, device: GraphDevice, pool: GraphPool) -> bool:
    """True if a value is, or holds, a tensor that a capture into the pool made."""
    tensors = (part for part in tensors_in(value) if has_address(part) and part.device == device.torch_device)
    return any(device.in_pool(pool, part) for part in tensors)


def _put_back(kept: Sequence[_Located], state: PythonState) -> tuple[list[str], Sequence[str]]:
    """Restore places; return the names of the places that held tensors, and of those that still hold one.

    A place whose earlier content is unknown keeps its tensor. The tensor's values are undefined: it is filled with NaN,
    which shows in results.
    """
    names = state.put_back()
    if not (tensors := _living(kept)):
        return names, []
    released = state.snapshot.release(lambda thing: any(thing is tensor for tensor in tensors))
    names += [name for name in released if name not in names]
    tensors.clear()
    still = _living(kept)
    for tensor in still:
        if tensor.is_floating_point():
            tensor.detach().fill_(math.nan)
    return names, [_UNSEEN] if still else []


_UNSEEN = "a place that the code does not lead to"
_UNSEEN_REMEDY = (
    "No Python object holds it. Code in C does, such as TorchScript's fused kernels under autograd: switch these off "
    "before their first run by torch._C._jit_set_texpr_fuser_enabled(False)."
)
_GRADIENT_REMEDY = (
    "It is the gradient of a tensor, set by backward(): return what torch.autograd.grad(loss, inputs) gives in place "
    "of calling backward(), or let simplegraph.train_step have the whole step."
)
_NORM_REMEDY = (
    "A hook of torch.nn.utils.weight_norm or spectral_norm sets it at each call: call remove_weight_norm or "
    "remove_spectral_norm on the layer before, or make it by torch.nn.utils.parametrizations."
)
_RETURNED_REMEDY = (
    "The forward also returns this tensor: keep what the call returns in the code that calls it, not in the forward. "
    "If the next call needs it, pass it as an argument."
)


def kept_by(names: Iterable[str]) -> str:
    """Return the sentence that places with these names would keep tensors of a graph."""
    return f"{quoted(names) or _UNSEEN} would keep a tensor that exists only inside the graph"


def quoted(names: Iterable[str]) -> str:
    """Join names of places: attributes in backquotes, descriptions such as "the global X of Y" without."""
    return ", ".join(name if " " in name else f"`{name}`" for name in names)


def _tensors_of(roots: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors in these objects and below them, except tensors that modules hold."""
    for tensor in Walk(roots, Policy(_kind_of_owned)).collect_tensors():
        yield from parts(tensor)


def _kind_of_owned(kind: type) -> Any:
    return None if issubclass(kind, nn.Module) else referring_kind(kind)


def _tensors_at(addresses: set[int]) -> list[_Located]:
    """Find every Python tensor that owns memory at one of these addresses, among all objects of the process."""
    if not addresses:
        return []
    with torch._C.DisableTorchFunctionSubclass():
        return [(weakref.ref(tensor), _address(tensor)) for tensor in all_tensors() if _address(tensor) in addresses]


def _holds_gradient(tensors: Sequence[Tensor]) -> bool:
    """True if one of these tensors is the gradient of any leaf of the process."""
    with torch._C.DisableTorchFunctionSubclass():
        leaves = (tensor for tensor in all_tensors() if tensor.is_leaf and tensor.grad is not None)
        return any(leaf.grad is tensor for leaf in leaves for tensor in tensors)


def _living(tensors: Iterable[_Located]) -> list[Tensor]:
    """Return the tensors that are alive and still in the same memory; a restored parameter has its own memory again."""
    living = ((reference(), address) for reference, address in tensors)
    return [tensor for tensor, address in living if tensor is not None and _address(tensor) == address]


def _address(tensor: Tensor) -> int:
    """Return the address of memory that a tensor owns, else 0. Borrowed memory is not owned: it cannot be resized."""
    if tensor.layout is not torch.strided or is_wrapper(tensor):
        return 0
    try:
        storage = tensor.untyped_storage()
        owned = storage.resizable() and storage.device.type != "meta"  # torch warns about addresses of fake tensors
        return storage.data_ptr() if owned else 0
    except (RuntimeError, NotImplementedError, ValueError):  # fake, functional or not initialised
        return 0
