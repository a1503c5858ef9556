"""`sleepable`, `sleep` and `wake`: memory is released and mapped again, and addresses and graphs stay."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from simplegraph.base.context import CALLS
from simplegraph.base.errors import CaptureError, ConfigError, did_you_mean, refuse_inside_capture
from simplegraph.base.extras import harmless_step_hooks, memory_sources
from simplegraph.base.patches import Door, original_of
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import has_address
from simplegraph.base.tensors import parts as parts_of
from simplegraph.call.inputs import TensorArg
from simplegraph.device.cuda.allocator import segments
from simplegraph.device.emulator.arena import Arena
from simplegraph.device.protocol import CAPTURE_LOCK, EARLY_LAUNCH_BLOCKERS, GraphDevice, GraphPool
from simplegraph.device.select import graph_device
from simplegraph.distributed.ranks import SingleRank
from simplegraph.sleeping.cuda import CudaRegion
from simplegraph.sleeping.emulated import EmulatedPool, EmulatedRegion
from simplegraph.sleeping.graph_holders import Holder, RegionMap, holders_of, kept_awake
from simplegraph.sleeping.regions import PARTS, AsleepError, MemoryRegion, Span, map_all
from simplegraph.training.step_effects import optimizers_of

_DOORS = {
    True: ("run", "replay", "capture", "memory_estimate"),
    False: ("call", "capture_all", "static_inputs", "announce_write"),
}
_STATE = threading.RLock()  # taken after pools' locks
_NAPS: list[Nap] = []
_REGIONS: list[MemoryRegion] = []
_STEP_HOOK: list[RemovableHandle] = []
_STEPPING: list[torch.optim.Optimizer] = []  # whose hooks are running
_POOLS: weakref.WeakKeyDictionary[Arena, EmulatedPool] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def sleepable(part: str = "weights", device: torch.device | str | None = None) -> Iterator[None]:
    """Let this thread allocate memory that `sleep` can release: build the model, or its caches, in the block.

        with sg.sleepable():
            model = sg.wrap(build().cuda().eval())
        with sg.sleepable("caches"):
            cache = torch.zeros(...)

    Memory of one block sleeps together. From the first block on, new graphs and their static inputs can sleep, too. The
    memory of dropped tensors is released by the next block, capture or `sleep`, not by ``torch.cuda.empty_cache``. On a
    GPU the first block sets ``release_lock_on_cudamalloc`` of torch's allocator.

    Args:
        part: "weights" or "caches", the names for `sleep` and `wake`.
        device: the device; None for the current GPU or, without a GPU, the CPU, which is emulated.

    Raises:
        ConfigError: `part` is another word, or the driver or torch has no such memory.
        CaptureError: the stream is being captured.
    """
    _check("part", part, PARTS[:2])
    graphs = graph_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    refuse_inside_capture(graphs.is_capturing())
    if not memory_sources:
        memory_sources.append(SleepableMemory())
    with _new_region(part, graphs).allocating():
        yield


def _new_region(part: str, device: GraphDevice) -> MemoryRegion:
    regions()  # gives unused ones back
    region: MemoryRegion = EmulatedRegion(part, device) if device.emulated else CudaRegion(part, device)
    _REGIONS.append(region)
    return region


class SleepableMemory:
    """Allocates the memory of graphs if memory of the process can sleep; see `memory_sources`."""

    def graph_pool_id(self, device: GraphDevice) -> Any:
        """Make a memory pool of torch's allocator for graphs, and return its id."""
        region: Any = _new_region("graphs", device)
        return region.pool_id

    def static_memory(self, args: Sequence[Any]) -> AbstractContextManager[None]:
        """Surround the allocation of the static inputs of some arguments."""
        device = next((arg.device for arg in args if isinstance(arg, TensorArg)), None)
        return contextlib.nullcontext() if device is None else _new_region("graphs", graph_device(device)).allocating()


def regions(pools: Iterable[GraphPool] = ()) -> list[MemoryRegion]:
    """List the regions that are in use or open, and those of emulated pools; release unused regions."""
    with CAPTURE_LOCK:  # which `synchronize` takes, and whoever makes a pool has: two threads may look at once
        look(_REGIONS)
        unused = [region for region in _REGIONS if region.unused and not region.asleep]
        for device in {region.device for region in unused}:
            device.synchronize()
        for region in unused:
            region.close()
            _REGIONS.remove(region)
    arenas = [pool.handle for pool in pools if isinstance(pool.handle, Arena)]
    emulated = [_POOLS.setdefault(arena, EmulatedPool(graph_device("cpu"), arena)) for arena in arenas]
    look(emulated)
    return [region for region in (*_REGIONS, *emulated) if region.blocks or region.open]


def look(chosen: Sequence[MemoryRegion]) -> None:
    """Update the contents of regions."""
    present: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
    if any(isinstance(region, CudaRegion) for region in chosen):
        for segment in segments():
            present[tuple(segment["segment_pool_id"])].append(segment)
    for region in chosen:
        region.look(present)


@dataclasses.dataclass(frozen=True)
class SleepReport:
    """The result of a `sleep`.

    Attributes:
        given_back: bytes of device memory that were released.
        on_host: bytes whose contents were copied to the host.
        kept: descriptions of memory that graphs read and that stayed awake, with its size if known.
        seconds: the time it took.
    """

    given_back: int
    on_host: int
    kept: tuple[str, ...]
    seconds: float


class Nap:
    """One sleep, until all its memory is awake again.

    Args:
        holders: the holders of graphs whose calls are refused meanwhile.
        asleep: the regions that sleep.
        wake_on_call: True to wake them at a call.
    """

    def __init__(self, holders: Sequence[Holder], asleep: Iterable[MemoryRegion], *, wake_on_call: bool) -> None:
        self.regions, self._wake_on_call = list(asleep), wake_on_call
        self.name = " and ".join(sorted({holder.name for holder in holders})) or "the process's sleepable memory"
        self.graphs = weakref.WeakSet(holder.graphs for holder in holders)
        self.ranks = {id(manager.ranks): manager.ranks for holder in holders for manager in holder.managers}.values()
        self.places = RegionMap(self.regions)
        self._undo = contextlib.ExitStack()

    def close_doors(self, holders: Sequence[Holder]) -> None:
        """Replace all methods that use the memory by ones that `knock` first. Call it with the pools' locks held."""
        EARLY_LAUNCH_BLOCKERS.add(self)
        self._undo.callback(EARLY_LAUNCH_BLOCKERS.discard, self)
        for holder in holders:
            self._close(holder.graphs, _DOORS[holder.graphs in holder.managers])
            # The first method that a replay calls with the pool's lock; a replay may be waiting for the lock now.
            for manager in holder.managers:
                self._close(manager.table, ["order_streams"])
            for state in [builder.state for builder in holder.builders if builder.state is not None]:
                self._close(state, ["moved"])
            for module in holder.modules:
                self._close(module, ["forward"])
                self._close(module, ["_apply", "load_state_dict", "state_dict"], "weights")
                self._close(original_of(module), ["__getstate__"])  # a copy or pickle would have these doors, too
                for optimizer in optimizers_of(module):
                    self._close(optimizer, ["load_state_dict", "state_dict", "__getstate__"], "weights")
                # A layer may run by itself, as for a prefill.
                for layer in filter(self.places.is_read_by, module.modules()):
                    self._close(
                        layer, ["forward", "_apply", "load_state_dict", "state_dict", "__getstate__"], "weights"
                    )

    def refuse_use(self, holders: Sequence[Holder]) -> None:
        """Let sleeping tensors refuse all uses, if torch supports that."""
        said = f"{self.name} is asleep: call wake() before its memory is read or written."
        storages: dict[MemoryRegion, list[torch.UntypedStorage]] = collections.defaultdict(list)
        for holder in holders:
            for _, tensor in holder.tensors():
                for part in filter(has_address, parts_of(tensor)):
                    region = self.places.region_of(part)
                    if region is not None:
                        storages[region].append(part.untyped_storage())
        for region, sleeping in storages.items():
            region.refuse_use(sleeping, said)

    def knock_for(self, tensors: Iterable[Tensor]) -> None:
        """Knock if one of these tensors is asleep. Raises AsleepError."""
        for region in filter(None, map(self.places.region_of, tensors)):
            if region.asleep:
                self.knock(region.part)

    def _close(self, owner: Any, names: Iterable[str], part: str = "") -> None:
        own = vars(owner)
        for name in names:
            if name in own:
                call, undo = own[name], functools.partial(own.__setitem__, name, own[name])
            else:
                call = functools.partial(_call_weakly, getattr(type(owner), name, vars), weakref.ref(owner))
                undo = functools.partial(own.pop, name, None)
            own[name] = Door(self._knock_first, call, part)
            self._undo.callback(undo)

    def _knock_first(self, call: Callable[..., Any], part: str, /, *args: Any, **kwargs: Any) -> Any:
        self.knock(part)
        return call(*args, **kwargs)

    def knock(self, part: str) -> None:
        """Wake for a call that needs this part, or any if it is empty; or refuse it.

        Raises:
            AsleepError: it is asleep, or there is not enough memory to wake.
        """
        needed = [region for region in self.regions if part in ("", region.part)]
        if not needed:
            return
        if not self._wake_on_call or needed[0].device.is_capturing():
            asleep = ", ".join(part for part in PARTS if any(region.part == part for region in self.regions))
            raise AsleepError(f"{self.name} is asleep ({asleep}): call wake() first, or sleep with wake_on_call=True.")
        self.wake(PARTS)

    def wake(self, parts: Collection[str]) -> None:
        """Wake these parts, or none of them if memory is short."""
        refuse_inside_capture(any(region.device.is_capturing() for region in self.regions))
        with _STATE:
            waking = [region for region in self.regions if region.part in parts]
            look(waking)
            with contextlib.ExitStack() as undo:
                with _agreed(self.ranks, "waking"):
                    map_all(waking, undo)
                undo.pop_all()
            for region in waking:
                region.allow_use()
                region.restore()
            for device in {region.device for region in waking}:
                device.synchronize()
            for region in waking:
                region.forget()
            self.regions = [region for region in self.regions if region not in waking]
            if not self.regions and self in _NAPS:
                self._undo.close()
                _NAPS.remove(self)
                _hook_steps()
        written = sorted({region.part for region in waking if region.written})
        for region in waking:
            region.written = False
        if written:
            raise AsleepError(
                f"memory of {self.name} ({', '.join(written)}) was written while it slept, and that is lost: on a GPU "
                "such a write ends the process's use of the GPU. It is awake now, with what it held before. "
                "Call wake() before you write."
            )


def _knock_before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Wake the parameters of an optimizer, or refuse its step; torch calls this before every step."""
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    used = [*parameters, *gradients, *state]
    _STEPPING.append(optimizer)
    try:
        for nap in [*_NAPS]:
            nap.knock_for(used)
    finally:
        _STEPPING.pop()


harmless_step_hooks.add(_knock_before_step)


def _hook_steps() -> None:
    """Hook the steps of all optimizers while anything sleeps."""
    if _NAPS and not _STEP_HOOK:
        _STEP_HOOK.append(register_optimizer_step_pre_hook(_knock_before_step))
    elif not _NAPS and _STEP_HOOK and not _STEPPING:  # else torch goes through its hooks: it stays until later
        _STEP_HOOK.pop().remove()


def _call_weakly(function: Callable[..., Any], owner: weakref.ref[Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(owner(), *args, **kwargs)


@contextlib.contextmanager
def _agreed(ranks: Iterable[SingleRank], action: str) -> Iterator[None]:
    """Raise an error on all ranks that act together if the block fails on one of them."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    for group in ranks:
        failure = group.failure(action, failed)
        if failure is not None and failed is None:
            failed = AsleepError(f"{action} failed on rank {failure[0]}, so nothing was done here:\n  {failure[1]}")
    if failed is not None:
        raise failed


def sleep(
    owner: Any = None,
    *,
    weights: str = "host",
    caches: str = "host",
    foreign: str = "keep",
    wake_on_call: bool = False,
) -> SleepReport:
    """Release device memory to the driver until `wake`; its addresses and all graphs stay.

    This releases the memory of graphs and static inputs, and memory that was allocated inside `sleepable`. It is also a
    method of wrapped modules, functions, steps and `CudaGraphManager`, for their own memory. Calls meanwhile raise
    `AsleepError`.

    Args:
        owner: a wrapped module or manager; everything in the process if None.
        weights: "host" copies the contents of weights to pinned memory; "discard" drops contents that a checkpoint of
            the wrapped modules would load (they are NaN until then); "keep" does not release weights.
        caches: the same for caches; discarded caches are zeros after waking.
        foreign: "keep" reports memory that graphs read and that cannot sleep; "refuse" raises an error for it.
        wake_on_call: True to wake the memory at a call, instead of raising an error.

    Raises:
        AsleepError: the memory is asleep already.
        ConfigError: an option is invalid, no memory of the owner can sleep, its `sleepable` block is open, or it shares
            memory with a holder that stays awake.
        InputError: `owner` is another kind of object.
        CaptureError: this thread is capturing, or running the forward of a wrapped module.
        RankError: a rank did not answer.
    """
    started = time.perf_counter()
    for name, value, choices in (
        ("weights", weights, _CONTENTS),
        ("caches", caches, _CONTENTS),
        ("foreign", foreign, _FOREIGN),
    ):
        _check(name, value, choices)
    kept_parts = {part for part, contents in (("weights", weights), ("caches", caches)) if contents == "keep"}
    if CALLS.context is not None and CALLS.context.bypass is Reason.NESTED:
        raise CaptureError("sleep was called inside the forward of a wrapped module; call it before or after.")
    holders = holders_of(owner)
    with _paused(holders), _STATE:
        awake = [holder for holder in holders if not _sleeps(holder)]
        if len(awake) < len(holders) and (owner is not None or not awake):
            raise AsleepError(f"{holders[0].name} is asleep already; call wake() first.")
        present = [region for region in regions(_pools(awake)) if not region.asleep]
        places = RegionMap(present)
        chosen = set(present) if owner is None else {region for holder in awake for region in places.of(holder)}
        asleep = [region for region in present if region in chosen and region.part not in kept_parts]
        nap = Nap(awake, asleep, wake_on_call=wake_on_call)
        try:
            with _agreed(nap.ranks, "going to sleep"):
                _check_complete(nap, awake, places)
                kept = tuple(line for holder in awake for line in kept_awake(holder, places))
                if kept and foreign == "refuse":
                    raise ConfigError(f"{nap.name} cannot sleep: its graphs read what stays awake: {'; '.join(kept)}.")
                loaded = {address for holder in awake for address in holder.loaded()} if weights == "discard" else set()
                for region in nap.regions:
                    region.save(_discards(region.part, caches, loaded))
                for device in {region.device for region in nap.regions}:
                    device.synchronize()
        except BaseException:
            for region in nap.regions:
                region.forget()
            raise
        nap.close_doors(awake)
        for region in nap.regions:
            region.give_back()
        nap.refuse_use(awake)
        _NAPS.append(nap)
        _hook_steps()
    return SleepReport(
        given_back=sum(region.size for region in nap.regions),
        on_host=sum(region.copied for region in nap.regions),
        kept=kept,
        seconds=time.perf_counter() - started,
    )


def wake(owner: Any = None, parts: Collection[str] | None = None) -> None:
    """Take the memory that `sleep` gave back, at the same addresses and with the same contents.

    Harmless where nothing is asleep.

    Args:
        owner: a wrapped module or manager; everything in the process if None.
        parts: "weights", "caches" or "graphs", or several; None for all. Calls are refused until all are awake.

    Raises:
        AsleepError: there is not enough memory; the message says how much is needed. `owner` is still asleep, and can
            wake later.
        ConfigError: a part is unknown.
        InputError: `owner` is something else.
    """
    if not isinstance(parts, Collection) or isinstance(parts, str):
        parts = PARTS if parts is None else [parts]
    for part in parts:
        _check("part", part, PARTS)
    own = None if owner is None else {holder.graphs for holder in holders_of(owner)}
    for nap in [nap for nap in _NAPS if own is None or not own.isdisjoint(nap.graphs)]:
        nap.wake(parts)


_CONTENTS, _FOREIGN = ("host", "discard", "keep"), ("keep", "refuse")


def _check(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} is {value!r}; expected one of {', '.join(choices)}{did_you_mean([str(value)], choices)}."
        )


def _sleeps(holder: Holder) -> bool:
    return any(holder.graphs in nap.graphs for nap in _NAPS)


def _pools(holders: Sequence[Holder]) -> list[Any]:
    pools = {manager.pool for holder in holders for manager in holder.managers}
    return sorted(pools, key=id)  # two threads lock them in one order


@contextlib.contextmanager
def _paused(holders: Sequence[Holder]) -> Iterator[None]:
    """Keep these from replaying and capturing in the block, and wait for their queued work."""
    with contextlib.ExitStack() as locks:
        devices = {region.device for region in [*_REGIONS]}.union(
            manager.device for holder in holders for manager in holder.managers
        )
        refuse_inside_capture(any(device.is_capturing() for device in devices))
        for pool in _pools(holders):
            locks.enter_context(pool.lock)
        for device in devices:
            device.synchronize()
        yield


def _check_complete(nap: Nap, holders: Sequence[Holder], places: RegionMap) -> None:
    """Refuse a sleep without memory, during an allocation, or of memory that a holder uses that stays awake."""
    if any(region.open for region in nap.regions):
        raise ConfigError(
            f"{nap.name} cannot sleep while an sg.sleepable() block is open that its memory comes from; "
            "call sleep() after the block."
        )
    if not nap.regions:
        raise ConfigError(
            f"nothing of {nap.name} can sleep: call sg.sleepable() first, then build the model and capture."
        )
    own, pools = {id(holder.graphs) for holder in holders}, {id(pool) for pool in _pools(holders)}
    for other in [holder for holder in holders_of(None) if id(holder.graphs) not in own]:
        if any(id(manager.pool) in pools for manager in other.managers) or not places.of(other).isdisjoint(nap.regions):
            raise ConfigError(
                f"{nap.name} shares sleepable memory with {other.name}, which is partly asleep; call wake() first."
                if _sleeps(other)
                else f"{nap.name} shares sleepable memory with {other.name}, which would stay awake. Build each in an "
                "sg.sleepable() block of its own, or put everything to sleep with sg.sleep()."
            )


def _discards(part: str, caches: str, loaded: Collection[int]) -> Callable[[Span], bool]:
    """Return a function that is true for blocks of this part whose contents are dropped."""
    return lambda span: span.address in loaded if part == "weights" else part == "caches" and caches == "discard"
