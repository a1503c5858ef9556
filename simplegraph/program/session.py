"""Set up what must hold while graphs are captured, and put it back afterwards, whatever happened.

Tensors of a capture that Python keeps outside the graph, in a global, a closure, a cache, anywhere, are found and
refused: a replay rewrites such memory, and until the first one it is undefined, so it means nothing to its keeper.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import math
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.collection import without_collections
from simplegraph.base.errors import CaptureError, EscapeError, InputError, refuse_inside_capture
from simplegraph.base.extras import wait_before_captures
from simplegraph.base.failures import capture_error
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import flatten
from simplegraph.base.tensors import has_address, is_wrapper, parts, wait_collectives
from simplegraph.device.memory import HostRandom, random_states
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, GraphPool, Segment
from simplegraph.program.breaks.marks import recording_breaks
from simplegraph.program.breaks.step import Break, BreakTrace
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.program import Program, SegmentRecorder
from simplegraph.program.snapshot import DEPTH, Snapshot, in_memory, tensors_in

_Found = tuple[weakref.ref[Tensor], int]  # a tensor, and where its memory began
_GRACE = 20  # ms in which other threads may let go of a tensor
_MAX_OBJECTS = 100_000  # of a Program's own; far above what its breaks are passed
_NOT_HELD = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, nn.Module)


class PythonState:
    """Remembers what captures may change in Python's objects: what code can reach.

    Args:
        roots: modules, functions and other objects that captures run.
        sizes: numbers of rows that captures have, and runs beside them that are undone.

    Attributes:
        refuses: True if what captures changed in there is no graph's to do.
        noted: True once notes were put back: a graph may do at every replay what eager does once.
    """

    refuses = False

    def __init__(self, roots: Iterable[Any] = (), sizes: Iterable[int] = ()) -> None:
        self._roots = list(roots)
        self._sizes = tuple(sizes)
        self.snapshot = Snapshot()
        self.noted = self.collected = False  # collected: all garbage there was

    def remember(self) -> None:
        """Remember it as it is: what real runs changed stays."""
        self.put_back_notes()  # of a run that was undone, if this was remembered before
        self.snapshot = Snapshot(*self._roots, code=DEPTH)

    def put_back(self) -> list[str]:
        """Put modules back as they were; returns the names of places that held memory of a graph."""
        return []

    def put_back_notes(self) -> None:
        """Put back notes under the numbers of rows: what they say is done, as that memory is filled, is undone."""
        self.noted |= self.snapshot.put_back(sizes=self._sizes, notes_only=True)

    def forget(self) -> None:
        """Remember nothing any more, so that nothing lives for that alone."""
        self.snapshot = Snapshot()

    def release(self, runs: Iterable[MemoryObserver]) -> None:
        """Let places hold what they held where they came to hold tensors that these runs made."""
        self.snapshot.release(
            functools.partial(in_memory, lambda part: any(run.made(part) for run in runs)), caches=False
        )

    def go_back_to(self, earlier: PythonState, runs: Iterable[MemoryObserver]) -> None:
        """Put back, and remember from now on, what a copy of this remembered earlier, before these runs."""
        earlier.put_back()
        earlier.release(runs)
        vars(self).update(vars(earlier))


def holds_graph_memory(value: Any, device: GraphDevice, pool: GraphPool) -> bool:
    """True if a value is, or holds, a tensor that a capture into the pool made: it means nothing outside a replay."""
    found = (part for part in tensors_in(value) if has_address(part) and part.device == device.torch_device)
    return any(device.in_pool(pool, part) for part in found)


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
    # A thread of autograd lets go of its last gradient a moment after `backward` has returned.
    for _ in range(_GRACE):
        if not _living(kept):
            return
        time.sleep(0.001)
    own_memory = {tensor.data_ptr() for tensor in _held_in(own)}
    remedy = _RETURNED_REMEDY if any(address in own_memory for _, address in kept) else KEPT_REMEDY
    names, undefined = _put_back(kept, state)
    cause = kept_by(names)
    if undefined:
        remedy += f"\n  What {', '.join(undefined)} held before is not known: what hangs there now is undefined."
    raise EscapeError(f"capturing {label} failed\n  {cause}.\n  {remedy}", cause=cause)


def take_back(left: set[int], state: PythonState) -> None:
    """Put back what Python objects held where a capture that failed left tensors.

    Args:
        left: addresses of what it made and something owned; what the error's own frames hold stays there.
        state: what Python's objects held before.
    """
    if kept := _tensors_at(left):
        _put_back(kept, state)


def _put_back(kept: Sequence[_Found], state: PythonState) -> tuple[list[str], Sequence[str]]:
    """Let places hold what they held; the names of those that held tensors, and of those that hold them still.

    Nothing is taken away from a place whose former content is not known. What such a place holds is undefined, and as
    NaN it shows.
    """
    names = state.put_back()
    if not (found := _living(kept)):
        return names, []
    released = state.snapshot.release(lambda thing: any(thing is tensor for tensor in found))
    names += [name for name in released if name not in names]
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
        if id(value) in seen or issubclass(type(value), _NOT_HELD):
            continue
        seen.add(id(value))
        if issubclass(type(value), Tensor):
            yield from parts(value)
        elif issubclass(type(value), types.FunctionType):
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


logger = logging.getLogger("simplegraph")


@dataclasses.dataclass(eq=False)
class CaptureSession:
    """One or many captures into one pool, on the capture stream, without garbage collection.

    `thorough` sessions, meant for many captures, also start from a synchronised device and an
    emptied cache, and collect before; a single lazy capture does without that.

    Args:
        device: where to capture.
        pool: what the captured tensors live in; its lock is held for the whole session.
        thorough: see above.

    Attributes:
        left: addresses of memory that a capture had made when it failed, and that something owned.
    """

    device: GraphDevice
    pool: GraphPool
    thorough: bool = dataclasses.field(kw_only=True)
    left: set[int] = dataclasses.field(default_factory=set, init=False)

    def __enter__(self) -> CaptureSession:
        refuse_inside_capture(self.device.is_capturing())
        wait_before_captures()  # before the locks, which what is called there may need
        with contextlib.ExitStack() as stack:
            # In this order everywhere: whoever serves a call holds its pool's lock already.
            stack.enter_context(self.pool.lock)
            stack.enter_context(CAPTURE_LOCK)
            stack.enter_context(without_collections())
            # What this session makes, all of it young with collection off: memory that cycles held shows as freed then.
            stack.callback(gc.collect, 0)
            if self.thorough:
                gc.collect(1)  # what was made lately; a whole collection takes longer than twenty captures
            stack.callback(self._hand_over)
            stack.enter_context(self.device.on_capture_stream())
            stack.enter_context(self.device.own_allocations())
            if self.thorough:
                self.device.synchronize()
                self.device.release_cached_memory()
            self.device.wait_for(self.pool.stream)
            self.pool.stream = self.device.current_stream()
            stack.enter_context(autocast_cache(enabled=False))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.__exit__(*exc_info)  # type: ignore[arg-type]

    def _hand_over(self) -> None:
        # The caller's stream has waited for the capture stream. Nothing else may wait for that one later:
        # it may be capturing for another thread by then.
        self.pool.stream = self.device.current_stream()

    def capture(
        self,
        run: Callable[[], Any],
        *,
        label: str,
        generators: Sequence[torch.Generator] = (),
        trace: BreakTrace | None = None,
        state: PythonState | None = None,
        observed: Callable[[], Iterable[Tensor]] = tuple,
        search: bool = True,
        wait: bool = True,
        follows: Program | None = None,
        followed: bool = False,
        ended: Callable[[], object] = bool,
    ) -> Program:
        """Record one run. The run executes nothing; its outputs hold values after the first replay.

        Args:
            run: the forward, on inputs whose addresses stay valid.
            label: what is captured, for messages ("batch size 8").
            generators: random generators, beside the device's default one, that the run draws from.
            trace: what a warmup saw of the run's eager breaks, which split it; None captures them as part of it.
            state: puts Python's objects back if the run left tensors in some.
            observed: returns tensors that observers of the run own.
            search: look for tensors left behind in a run with breaks, too, whose own take long to tell from those.
            wait: return once it can be replayed; otherwise call `Program.wait` before that.
            follows: the Program captured last, which every replay of this one comes after: this one reads its memory.
            followed: the next capture follows this one; what both leave behind is looked for then.
            ended: called when the recording is over; what it lets go of kept its memory from being used again in there.

        Raises:
            CaptureError: the run cannot be captured, or left tensors of the graph in Python objects. Stream, pool and
                generators are as they were before the call.
        """
        started, free_before = time.perf_counter(), self.device.free_memory()
        recorder = SegmentRecorder(self.device, self.pool, generators, trace, follows is not None)
        self.pool.watched = search or trace is None
        try:
            result, steps = self._record(recorder, run)
            ended()
            seconds = time.perf_counter() - started
            leaves, spec = flatten(result)
            held = {id(leaf): self._held(leaf) for leaf in leaves}  # one tensor returned twice stays one
            outputs = [held[id(leaf)] for leaf in leaves]
            del result, leaves, held
            taken = max(0, free_before - self.device.free_memory())
            program = Program(self.device, steps, outputs, spec, seconds, taken, recorder.all_generators)
            # Outputs are borrowed by now, so that one which is kept elsewhere shows.
            if self.pool.watched and not followed:
                own, state = [*program.held, *(() if follows is None else follows.held)], state or PythonState()
                refuse_escapes(self.device, self.pool, label, own=own, state=state, observed=observed)
            if wait:
                program.wait()
            return program
        except BaseException as error:
            recorder.drop()
            if isinstance(error, (CaptureError, InputError)) or not isinstance(error, Exception):
                raise
            raise capture_error(error, label) from error

    def _record(self, recorder: SegmentRecorder, run: Callable[[], Any]) -> tuple[Any, tuple[Segment | Break, ...]]:
        """Run what is recorded, and return its result and the steps; nothing is under way after a failure."""
        with _reseeding_shows(recorder.all_generators):
            try:
                recorder.begin()
                with recording_breaks(None if recorder.trace is None else recorder):
                    result = wait_collectives(run())
                return result, recorder.finish()
            except BaseException as error:
                if self.pool.watched:
                    self.left = self._left_alive()
                refused = self.device.abandon()
                if refused is None or refused is error or not isinstance(error, RuntimeError) or error.__cause__:
                    raise
                raise error from refused

    def _left_alive(self) -> set[int]:
        try:
            return self.device.left_alive(self.pool)
        except RuntimeError as error:  # the failure that is reported comes first
            logger.debug("the memory that a failed capture left cannot be listed: %s", error)
            return set()

    def _held(self, leaf: Any) -> Any:
        """Return an output as the Program keeps it: pool memory is borrowed, so that smaller sizes reuse it."""
        if isinstance(leaf, Tensor) and not is_wrapper(leaf) and self.device.in_pool(self.pool, leaf):
            return self.device.borrow(self.pool, leaf)
        return leaf


@contextlib.contextmanager
def _reseeding_shows(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Give generators an unlikely seed for the time of a capture.

    Capturing draws no numbers, and reseeding is refused, but not to the seed that is set already: eager
    would start over then, and replays go on. Generators of the host do draw, and are put back.
    """
    states, host = random_states(generators), HostRandom()
    for generator in generators:
        generator.manual_seed(_UNLIKELY_SEED)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        host.put_back()


_UNLIKELY_SEED = 0x5EED_0F_50AB0D1E5
