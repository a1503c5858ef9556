"""Set up what must hold while graphs are captured, and put it back afterwards, whatever happened."""

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
from simplegraph.device.memory import HostRandom, random_states
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, GraphPool, Segment
from simplegraph.program.breaks.marks import recording_breaks
from simplegraph.program.breaks.step import Break, BreakTrace
from simplegraph.program.probes import Probe, RecordedRun, Run
from simplegraph.program.program import Program, SegmentRecorder

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
    """

    device: GraphDevice
    pool: GraphPool
    thorough: bool = dataclasses.field(kw_only=True)

    def __enter__(self) -> CaptureSession:
        refuse_inside_capture(self.device.is_capturing())
        wait_before_captures()  # before the locks are taken, since the callbacks may need them
        with contextlib.ExitStack() as stack:
            # In this order everywhere: whoever serves a call holds its pool's lock already.
            stack.enter_context(self.pool.lock)
            stack.enter_context(CAPTURE_LOCK)
            stack.enter_context(without_collections())
            # With collection off, everything that this session makes is young: memory that cycles held then shows as
            # freed.
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
        label: str = "",
        about: Run | None = None,
        probes: Sequence[Probe] = (),
        generators: Sequence[torch.Generator] = (),
        trace: BreakTrace | None = None,
        wait: bool = True,
        follows: Program | None = None,
        followed: bool = False,
    ) -> Program:
        """Record one run. The run executes nothing; its outputs hold values after the first replay.

        Args:
            run: the forward, on inputs whose addresses stay valid.
            label: what is captured, for messages ("batch size 8"), if `about` does not tell.
            about: what is captured, for probes. In an unobserved run with breaks, tensors left behind are not searched
                for: they are hard to tell from the breaks' own.
            probes: look at the recording, and may refuse it.
            generators: random generators, beside the device's default one, that the run draws from.
            trace: what a warmup saw of the run's eager breaks, which split it; None captures them as part of it.
            wait: return once it can be replayed; otherwise call `Program.wait` before that.
            follows: the Program captured last, which every replay of this one comes after: this one reads its memory.
            followed: the next capture follows this one; what both leave behind is looked for then.

        Raises:
            CaptureError: the run cannot be captured, or a probe refuses it. Stream, pool and generators are as they
                were before the call; `about.left_addresses` has the memory that something still owned.
        """
        about = about or Run(label=label, recorded=True)
        started, free_before = time.perf_counter(), self.device.free_memory()
        recorder = SegmentRecorder(self.device, self.pool, generators, trace, follows is not None)
        self.pool.watched = about.observed or trace is None
        try:
            result, steps = self._record(recorder, run, about)
            seconds = time.perf_counter() - started
            leaves, spec = flatten(result)
            borrowed = {id(leaf): self._held(leaf) for leaf in leaves}  # one tensor returned twice stays one
            outputs = [borrowed[id(leaf)] for leaf in leaves]
            del result, leaves, borrowed
            taken = max(0, free_before - self.device.free_memory())
            program = Program(self.device, steps, outputs, spec, seconds, taken, recorder.all_generators)
            # Outputs are borrowed by now, so that one which is kept elsewhere shows.
            holds = [*program.held, *(() if follows is None else follows.held)]
            searched = self.pool.watched and not followed
            recorded = RecordedRun(about, self.device, self.pool, program, holds, searched)
            for probe in reversed(probes):
                probe.after_recording(recorded)
            if wait:
                program.wait()
            return program
        except BaseException as error:
            recorder.drop()
            if isinstance(error, (CaptureError, InputError)) or not isinstance(error, Exception):
                raise
            raise capture_error(error, about.label, trains=about.job is not None and about.job.trains) from error

    def _record(
        self, recorder: SegmentRecorder, run: Callable[[], Any], about: Run
    ) -> tuple[Any, tuple[Segment | Break, ...]]:
        """Run what is recorded, and return its result and the steps; nothing is under way after a failure."""
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
