"""Set up what must hold while graphs are captured, and put it back afterwards, whatever happened."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.break_operators import recording_breaks
from simplegraph.base.errors import CaptureError, InputError, refuse_inside_capture
from simplegraph.base.extras import wait_before_captures
from simplegraph.base.failures import capture_error
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.tensors import is_wrapper, wait_collectives
from simplegraph.device.generators import HostRandom, random_states
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, GraphPool, Segment
from simplegraph.program.breaks.recorder import SegmentRecorder
from simplegraph.program.breaks.step import Break, BreakTrace
from simplegraph.program.escapes import PythonState, refuse_escapes
from simplegraph.program.program import Program

logger = logging.getLogger("simplegraph")


@dataclasses.dataclass(eq=False)
class CaptureSession:
    """One or many captures into one pool, on the capture stream, with garbage collection paused.

    A graph destroyed by the collector during another's capture is an error (pytorch #161037), so gc is
    off. `thorough` sessions, meant for many captures, also start from a synchronised device and an
    emptied cache, and collect before and after; a single lazy capture does without that.

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
            stack.enter_context(_collection_paused(self.thorough))
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
        started = time.perf_counter()
        free_before = self.device.free_memory()
        recorder = SegmentRecorder(self.device, self.pool, generators, trace, follows is not None)
        self.pool.watched = search or trace is None
        try:
            result, steps = self._record(recorder, run)
            ended()
            seconds = time.perf_counter() - started
            outputs, spec = self._borrowed(result)
            del result
            taken = max(0, free_before - self.device.free_memory())
            program = Program(self.device, steps, outputs, spec, seconds, taken, recorder.all_generators)
            # Outputs are borrowed by now, so that one which is kept elsewhere shows.
            state = state or PythonState()
            if self.pool.watched and not followed:
                own = program.held if follows is None else [*program.held, *follows.held]
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

    def _borrowed(self, result: Any) -> tuple[list[Any], TreeSpec]:
        """Return outputs as the Program keeps them: pool memory is borrowed, so that smaller sizes reuse it."""
        leaves, spec = flatten(result)
        held = {id(leaf): self._held(leaf) for leaf in leaves}  # one tensor returned twice stays one
        return [held[id(leaf)] for leaf in leaves], spec

    def _held(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not is_wrapper(leaf) and self.device.in_pool(self.pool, leaf):
            return self.device.borrow(self.pool, leaf)
        return leaf


@contextlib.contextmanager
def _collection_paused(thorough: bool) -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect(1 if thorough else 0)  # what was made lately; a whole collection takes longer than twenty captures
    gc.disable()
    try:
        yield
    finally:
        if thorough:
            gc.collect(0)  # what this session made: with collection off, all of it is young
        if was_enabled:
            gc.enable()


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
