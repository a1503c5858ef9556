"""Find what captures changed in Python's objects, and put it back.

Tensors of a capture that Python keeps outside the graph, in a global, a closure, a cache, anywhere, are found and
refused: a replay rewrites such memory, and until the first one it is undefined, so it means nothing to its keeper.
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

_Located = tuple[weakref.ref[Tensor], int]  # a tensor, and where its memory began
_GRACE = 20  # ms in which other threads may let go of a tensor


class MakesMemory(Protocol):
    """A run that tells which memory it made, such as a `Run` or an observer of one."""

    @property
    def made(self) -> Callable[[Tensor], bool]:
        """Return a function that is true for a tensor in memory that the run made."""


class PythonState(Probe):
    """Remembers what captures may change in Python's objects: what code can reach.

    Args:
        roots: modules, functions and other objects that captures run.

    Attributes:
        kept_remedy: what to do about a place that would keep a tensor, where nothing more is known of it.
    """

    kept_remedy = "Return it instead, or copy it into a buffer of the module."

    def __init__(self, roots: Iterable[Any] = ()) -> None:
        self._roots = list(roots)
        self.snapshot = Snapshot()
        self.collected = False  # all garbage there was
        # By place and key, the done flags of runs that are undone: in this pass of captures, and in the one before.
        self._flags: dict[tuple[int, Any], DoneFlag] = {}
        self._flags_before: dict[tuple[int, Any], DoneFlag] = {}
        self._by_recordings: set[tuple[int, Any]] = set()  # those that a recording made
        self._recorded = False  # a recording ended, and its done flags are still set
        self._earlier: PythonState | None = None  # before a second try

    def before_captures(self, *, again: bool = False) -> None:
        """Remember the present state: what real runs changed stays."""
        self.put_back_flags()  # of a run that was undone, if the state was remembered before
        if not again:
            self._flags_before, self._flags = self._flags, {}
            self._by_recordings.clear()
        self.snapshot = Snapshot(*self._roots, code=True)

    def after_recording(self, recorded: RecordedRun) -> None:
        """Refuse a capture that left tensors of its graph in Python objects, and put back what these held.

        Memory that no tensor of Python owns belongs to a library, such as cuBLAS for its workspace.

        Raises:
            EscapeError: tensors were left.
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
        gc.collect(0)  # a cycle is no escape
        kept = _tensors_at(device.left_alive(pool) - owned_addresses)
        if kept and not self.collected:  # once, since it takes longer than twenty captures
            self.collected = True
            gc.collect()
        # A thread of autograd lets go of its last gradient a moment after `backward` has returned.
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
            remedy += f"\n  What {', '.join(undefined)} held before is not known: what hangs there now is undefined."
        raise EscapeError(f"capturing {recorded.run.label} failed\n  {cause}.\n  {remedy}", cause=cause)

    def note_kept(self, run: Run, names: Sequence[str]) -> None:
        """Note which places a recording left tensors in, before that is refused."""

    def remedy(self, names: Iterable[str]) -> str:
        """Return the advice for places of these names that would keep a tensor."""
        roots = [root for root in self._roots if isinstance(root, nn.Module)]
        for name, root in itertools.product(names, roots):
            owner, _, attribute = name.rpartition(".")
            if is_set_by_hook(dict(root.named_modules()).get(owner), attribute):
                return _NORM_REMEDY
            if library_remedy := remedy_for_library(root, name):
                return library_remedy
        return self.kept_remedy

    def undo(self, stage: Undone, runs: Sequence[Run]) -> None:
        """Put back what a stage changed; after `SECOND_TRY`, also go on from what was there before it."""
        if stage is Undone.RUN:
            self.put_back_flags()
        elif stage is Undone.RECORDING:
            for run in runs:
                if kept := _tensors_at(run.left_addresses):  # what the error's own frames hold stays there
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
        """Restore another thread's flags, and forget everything, so that nothing is kept alive."""
        if self._flags_before:
            for key in self._flags.keys() ^ self._flags_before.keys():
                flag = (self._flags_before | self._flags)[key]
                flag.exchange(flag.before, flag.now)
            self._flags, self._flags_before = {}, {}
        self.snapshot, self._earlier = Snapshot(), None
        return summary

    def put_back(self) -> list[str]:
        """Put modules back as they were; returns the names of places that held memory of a graph."""
        return []

    def put_back_flags(self) -> None:
        """Put back done flags: they say that work is done, such as memory filled, and the run was undone."""
        flags = {(id(flag.place), flag.key): flag for flag in self.snapshot.take_done_flags()}
        self._flags = flags | self._flags
        self._by_recordings |= flags.keys() if self._recorded else set()
        self._recorded = False

    @property
    def sets_flags(self) -> bool:  # type: ignore[override]
        """True if recordings set done flags, or another thread did meanwhile."""
        return bool(self._by_recordings)

    def set_twice(self) -> list[str]:
        return sorted({self._flags[key].name for key in self._by_recordings & self._flags_before.keys()})

    def release(self, runs: Iterable[MakesMemory]) -> None:
        """Restore places that came to hold tensors made by these runs."""
        self.snapshot.release(
            functools.partial(in_memory, lambda part: any(run.made(part) for run in runs)), caches=False
        )


def holds_graph_memory(value: Any, device: GraphDevice, pool: GraphPool) -> bool:
    """True if a value is, or holds, a tensor that a capture into the pool made: it means nothing outside a replay."""
    tensors = (part for part in tensors_in(value) if has_address(part) and part.device == device.torch_device)
    return any(device.in_pool(pool, part) for part in tensors)


def _put_back(kept: Sequence[_Located], state: PythonState) -> tuple[list[str], Sequence[str]]:
    """Restore places; return the names of those that held tensors, and of those that still do.

    A place whose former content is not known is left alone. Its tensor is undefined, and filled with NaN so that it
    shows.
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
    "Nothing that Python shows holds it: code in C does, such as TorchScript's fused kernels under autograd, which "
    "torch._C._jit_set_texpr_fuser_enabled(False) before their first run leaves out."
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
    "The forward also returns it: do not keep it there, and store what the call returns in the code that calls. State "
    "that the next call reads becomes an argument."
)


def kept_by(names: Iterable[str]) -> str:
    """Say that places of these names would keep tensors of a graph."""
    return f"{quoted(names) or _UNSEEN} would keep a tensor that exists only inside the graph"


def quoted(names: Iterable[str]) -> str:
    """List names of places: names of attributes in backquotes, descriptions such as "the global X of Y" as they are."""
    return ", ".join(name if " " in name else f"`{name}`" for name in names)


def _tensors_of(roots: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors in these objects and in what they hold, but for what modules hold."""
    for tensor in Walk(roots, Policy(_kind_of_owned)).collect_tensors():
        yield from parts(tensor)


def _kind_of_owned(kind: type) -> Any:
    return None if issubclass(kind, nn.Module) else referring_kind(kind)


def _tensors_at(addresses: set[int]) -> list[_Located]:
    """Find every Python tensor that owns memory at one of these addresses; looks at all objects of the process."""
    if not addresses:
        return []
    with torch._C.DisableTorchFunctionSubclass():
        return [(weakref.ref(tensor), _address(tensor)) for tensor in all_tensors() if _address(tensor) in addresses]


def _holds_gradient(tensors: Sequence[Tensor]) -> bool:
    """True if one of these tensors is the gradient of a leaf, also of one that the code does not lead to."""
    with torch._C.DisableTorchFunctionSubclass():
        leaves = (tensor for tensor in all_tensors() if tensor.is_leaf and tensor.grad is not None)
        return any(leaf.grad is tensor for leaf in leaves for tensor in tensors)


def _living(tensors: Iterable[_Located]) -> list[Tensor]:
    """Return the tensors that are alive and still in the same memory: a parameter may have its own again."""
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
