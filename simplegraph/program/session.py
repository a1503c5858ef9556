"""Set up streams, locks and modes for captures, and restore them afterwards, also after a failure."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.collection import without_collections
from simplegraph.base.errors import CaptureError, InputError, refuse_inside_capture
from simplegraph.base.extras import wait_before_captures
from simplegraph.base.failures import capture_error
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import flatten
from simplegraph.base.tensors import is_wrapper, wait_collectives
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, GraphPool, Segment
from simplegraph.device.saved_state import HostRandom, random_states
from simplegraph.program.breaks.break_calls import Break, BreakTrace
from simplegraph.program.breaks.marks import recording_breaks
from simplegraph.program.probes import Probe, RecordedRun, Run
from simplegraph.program.program import Program, SegmentRecorder

logger = logging.getLogger("simplegraph")


@dataclasses.dataclass(eq=False)
class CaptureSession:
    """Captures one or several runs into one pool, on the capture stream, without garbage collection.

    A `thorough` session is meant for many captures: it also collects garbage, synchronizes the device and empties the
    allocator's cache before the first. A single lazy capture does not need that.

    Args:
        device: the device to capture on.
        pool: the memory of the captured tensors; its lock is held for the whole session.
        thorough: True for a thorough session.
    """

    device: GraphDevice
    pool: GraphPool
    thorough: bool = dataclasses.field(kw_only=True)

    def __enter__(self) -> CaptureSession:
        refuse_inside_capture(self.device.is_capturing())
        wait_before_captures()  # before the locks are taken, since the callbacks may need them
        with contextlib.ExitStack() as stack:
            # Locks are taken in this order everywhere: the code that serves a call holds its pool's lock already.
            stack.enter_context(self.pool.lock)
            stack.enter_context(CAPTURE_LOCK)
            stack.enter_context(without_collections())
            # While collection is paused, all objects of this session stay in the youngest generation. Collecting it at
            # the end frees memory that reference cycles hold.
            stack.callback(gc.collect, 0)
            if self.thorough:
                gc.collect(1)  # recent objects only: a full collection takes longer than twenty captures
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
        # The caller's stream has waited for the capture stream. Later replays must not wait for the capture stream,
        # which may be capturing for another thread by then.
        self.pool.stream = self.device.current_stream()

    def capture(
        self,
        run: Callable[[], Any],
        *,
        about: Run,
        probes: Sequence[Probe] = (),
        generators: Sequence[torch.Generator] = (),
        trace: BreakTrace | None = None,
        follows: Program | None = None,
        followed: bool = False,
    ) -> Program:
        """Record one run. The run executes nothing on the device; its outputs hold values after the first replay.

        Call `Program.wait` before that: the driver may instantiate a graph while the next one is captured.

        Args:
            run: the forward, on inputs whose addresses stay valid.
            about: the description of the run for probes. In an unobserved run with breaks, tensors that the run left
                behind are not searched for: they cannot be distinguished from tensors of the breaks.
            probes: inspect the recording, and may refuse it.
            generators: random generators, beside the device's default one, that the run draws from.
            trace: the eager breaks as a warmup met them, at which the run is split; None captures them as part of it.
            follows: the Program captured last, if this one reads its memory and is always replayed after it.
            followed: True if the next capture follows this one; tensors left behind are searched for after that one.

        Raises:
            CaptureError: the run cannot be captured, or a probe refuses it. Stream, pool and generators are restored;
                `about.left_addresses` has the addresses of the recording's memory that something still owns.
        """
        started, free_before = time.perf_counter(), self.device.free_memory()
        recorder = SegmentRecorder(self.device, self.pool, generators, trace, follows is not None)
        self.pool.watched = about.observed or trace is None
        try:
            result, steps = self._record(recorder, run, about)
            seconds = time.perf_counter() - started
            leaves, spec = flatten(result)
            borrowed = {id(leaf): self._borrow_output(leaf) for leaf in leaves}  # one tensor returned twice stays one
            outputs = [borrowed[id(leaf)] for leaf in leaves]
            del result, leaves, borrowed
            taken = max(0, free_before - self.device.free_memory())
            program = Program(self.device, steps, outputs, spec, seconds, taken, recorder.all_generators)
            # Outputs are borrowed by now: if an output's memory is still owned, something else keeps it.
            holds = [*program.held, *(() if follows is None else follows.held)]
            searched = self.pool.watched and not followed
            recorded = RecordedRun(about, self.device, self.pool, program, holds, searched)
            for probe in reversed(probes):
                probe.after_recording(recorded)
            return program
        except BaseException as error:
            recorder.drop()
            if isinstance(error, (CaptureError, InputError)) or not isinstance(error, Exception):
                raise
            raise capture_error(error, about.label, trains=about.job is not None and about.job.trains) from error

    def _record(
        self, recorder: SegmentRecorder, run: Callable[[], Any], about: Run
    ) -> tuple[Any, tuple[Segment | Break, ...]]:
        """Record a run, and return its result and the steps; after a failure, no capture is under way."""
        with _reseeding_shows(recorder.all_generators):
            try:
                recorder.begin()
                with recording_breaks(None if recorder.trace is None else recorder):
                    result = wait_collectives(run())
                return result, recorder.finish()
            except BaseException as error:
                if self.pool.watched:
                    about.left_addresses = self._left_alive()
                refused = self.device.abandon()
                if refused is None or refused is error or not isinstance(error, RuntimeError) or error.__cause__:
                    raise
                raise error from refused

    def _left_alive(self) -> set[int]:
        try:
            return self.device.left_alive(self.pool)
        except RuntimeError as error:  # the failure of the capture is the one to report
            logger.debug("the memory that a failed capture left cannot be listed: %s", error)
            return set()

    def _borrow_output(self, leaf: Any) -> Any:
        """Return an output as the Program keeps it: pool memory is borrowed, so that smaller sizes reuse it."""
        if isinstance(leaf, Tensor) and not is_wrapper(leaf) and self.device.in_pool(self.pool, leaf):
            return self.device.borrow(self.pool, leaf)
        return leaf


@contextlib.contextmanager
def _reseeding_shows(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Give generators an unlikely seed during a capture, so that reseeding is noticed.

    A capture draws no numbers. Torch refuses to reseed a generator in it, except with the seed that is set already: an
    eager run would then restart the sequence, and a replay would not. The host's generators do draw, and are restored.
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
