"""The capture of a model's graphs, from the jobs to the table: warmups, sessions, second tries, other ranks."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import CaptureError, EscapeError, InputError
from simplegraph.base.extras import entered
from simplegraph.base.failures import capture_error, release_locals
from simplegraph.base.modes import autocast_cache
from simplegraph.base.nested import WithheldError
from simplegraph.base.tensors import wait_collectives
from simplegraph.device.protocol import GraphDevice
from simplegraph.manager.stats import CaptureSummary
from simplegraph.manager.table import OTHERS_TOO, CaptureJob, Key, ProgramTable, on_all_ranks
from simplegraph.manager.touched import inspect_graphs
from simplegraph.program.breaks.marks import breaking_operators, recording_breaks
from simplegraph.program.breaks.step import BreakTrace
from simplegraph.program.host_modes import HostArguments, HostCapture, HostWarmup
from simplegraph.program.observe import MemoryObserver, observed_tensors
from simplegraph.program.program import Program
from simplegraph.program.session import CaptureSession, PythonState, take_back

logger = logging.getLogger("simplegraph")
Rehearsing = Callable[[], contextlib.AbstractContextManager[Callable[[Tensor], object]]]
_REAL: Rehearsing = lambda: contextlib.nullcontext(id)  # noqa: E731 - of a run that nothing is put back after
_HELD_ATTENTION = (
    "capturing {} failed\n  {}: the graph would hold the attention.\n"
    "  Mark it with @simplegraph.eager_break or simplegraph.break_at, or tag its operator cudagraph_unsafe."
)


def run_observed(
    table: ProgramTable,
    run: Callable[[], Any],
    key: Key | None = None,
    *,
    traced: bool = False,
    rows: int = 0,
    inputs: Collection[int] = (),
    arguments: HostArguments | None = None,
    before_write: Callable[[Tensor], object] = id,
) -> tuple[Any, MemoryObserver, BreakTrace | None]:
    """Run a forward eagerly, and note what it reads and writes.

    Args:
        table: of the graphs that it is a warmup of; it gets their constants.
        run: the forward.
        key: whose warmup it is, a graph's or that of several; None if it is none.
        traced: note what its breaks return, too.
        rows: its batch size, if known.
        inputs: storage keys of its tensors.
        arguments: the CPU tensors that it is passed, where it runs on another device.
        before_write: see `MemoryObserver`.
    """
    observer = MemoryObserver(rows=rows, before_write=before_write)
    tracer = None
    if traced:
        from simplegraph.program.breaks.eager import BreakTracer  # not loaded for full graphs

        operators = breaking_operators()
        tracer = BreakTracer(operators, observer, table.device.torch_device, inputs)
    host = HostWarmup(table.device.torch_device, arguments)
    following = contextlib.nullcontext() if key is None else host.following(observer)
    noting = entered({} if key is None else table.constants.notes, as_captured=False)
    # Under grad mode each use of a weight's cast adds to one gradient, and the cache is the caller's.
    casts = contextlib.nullcontext() if torch.is_grad_enabled() else autocast_cache(enabled=False)
    # The observer is asked first: it sees the operators of the forward, not those that stand in for them.
    with casts, recording_breaks(tracer), following, observer, noting:
        outputs = wait_collectives(run())
    if key is not None:
        table.constants.learn(key, host.copies, host.sources, met_host=host.met_host)
    return outputs, observer, None if tracer is None else tracer.finish(outputs)


@dataclasses.dataclass(eq=False)
class GraphCapture:
    """Captures jobs in one session; their Programs go into the table.

    A capture is transactional: where one fails, everything is put back and the others go on. A size
    that failed without a warmup of its own gets one and a second try: autotuners need it.

    Args:
        table: where the Programs go.
        jobs: largest first, so that the smaller ones reuse the pool's memory.
        settings: beside the configuration, what ranks that capture together must have alike.
        lazy: this is a single capture in the middle of serving.
        retry: a size that failed gets a warmup of its own and a second try.
        rehearsing: makes the context of each warmup that is no real run, which gives its observer's `before_write`.
        state: Python's objects, remembered before the captures and put back after one that fails.

    Attributes:
        observers: what warmups and captures were seen to read. Looking costs time, so where the largest and the
            smallest size read the same memory, the others are taken to do so too.
        reads: CPU tensors from before whose values captures took, by their place in memory.
    """

    table: ProgramTable
    jobs: Sequence[CaptureJob]
    settings: dict[str, Any]
    lazy: bool = False
    retry: bool = True
    rehearsing: Rehearsing = _REAL
    state: PythonState = dataclasses.field(default_factory=PythonState)
    observers: list[MemoryObserver] = dataclasses.field(default_factory=list)
    reads: dict[tuple[Any, ...], Tensor] = dataclasses.field(default_factory=dict)
    _failed: dict[str, CaptureError] = dataclasses.field(default_factory=dict)
    _raised: dict[str, Exception] = dataclasses.field(default_factory=dict)  # by eager runs
    _traced: list[MemoryObserver] = dataclasses.field(default_factory=list)  # of warmups for what breaks return

    def __post_init__(self) -> None:
        self._ranks = self.table.ranks
        following = [at for at, job in enumerate(self.jobs) if job.follows is not None]
        self._followed = {job.key for job in self.jobs[: max(following, default=0)]}

    def run(self, num_warmups: int = 0, warmed_up: Callable[[], object] = bool) -> CaptureSummary:
        """Run the first job eagerly, or each job so often if `num_warmups` is above 1, then capture them all.

        Args:
            num_warmups: real runs.
            warmed_up: called between these and the captures.

        Raises:
            ConfigError: ranks differ in their settings.
            Exception: the forward's own, if no size can even run eagerly: then its inputs are at fault, not the graphs.
        """
        table, jobs, ranks = self.table, self.jobs, self._ranks
        started = time.perf_counter()
        ranks.seconds.clear()
        with ranks.together():
            names = [field.name for field in dataclasses.fields(table.config) if field.name != "progress"]
            own = {"support": table.support.name, **self.settings, "warmups": num_warmups, "torch": torch.__version__}
            shared = {name: repr(getattr(table.config, name)) for name in names} | {k: str(v) for k, v in own.items()}
            ranks.begin(shared, ", ".join(job.label for job in jobs), table.device)
        if not jobs:
            return CaptureSummary(0, self._failed, 0.0, 0, switched_off=table.config.mode is CudaGraphMode.NONE)
        free_before, before = table.device.free_memory(), table.stats.captures
        with table.releasing_unused_pool():  # whatever happens
            self._run_session(num_warmups, warmed_up)
        memory = any(isinstance(error, torch.OutOfMemoryError) for error in self._raised.values())
        if ranks.size == 1 and not self.lazy and not memory and all(job.label in self._raised for job in jobs):
            raise self._raised[jobs[0].label]
        captured = table.stats.captures - before
        others = f"{captured or 'no'} other size{'s were' if captured > 1 else ' was'} captured"
        outcome = OTHERS_TOO if self.lazy else others
        table.add_failures({job: self._failed[job.label] for job in jobs if job.label in self._failed}, outcome)
        self.observers += self._traced
        taken = max(0, free_before - table.device.free_memory())
        return CaptureSummary(captured, self._failed, time.perf_counter() - started, taken, dict(ranks.seconds))

    def inspect(self, summary: CaptureSummary) -> CaptureSummary:
        """Drop graphs that touch memory which was given back; return what is left of those captured.

        Everything must be over that could have undone the captures: nothing may live for that alone.
        """
        self.state.forget()
        return inspect_graphs(self.table, self.jobs, list(observed_tensors(self.observers)), summary)

    def _run_session(self, num_warmups: int, warmed_up: Callable[[], object]) -> None:
        table, jobs = self.table, self.jobs
        with self._ranks.together(), CaptureSession(table.device, table.pool, thorough=not self.lazy) as session:
            for job in jobs if num_warmups > 1 else jobs[:1]:
                self._warm_up_often(job, num_warmups)
            self.state.remember()
            warmed_up()
            try:
                self._capture_each(session)
            finally:  # whatever came of the others
                self.state.put_back_notes()
                unready = {}
                with self._ranks.seconds.timed("instantiate"):
                    for job in (job for job in jobs if job.key in table.graphs):
                        table.graphs[job.key].once = set() if self.state.noted else None
                        try:
                            table.graphs[job.key].program.wait()
                        except Exception as error:
                            unready[job.label] = capture_error(error, job.label)
            dropped = on_all_ranks(table, "instantiating", jobs, unready)
            table.forget([job for job in jobs if job.label in dropped])
            self._failed |= dropped

    def rehearse_warmups(self, num_warmups: int, already: int) -> None:
        """Run each job eagerly so often, less the runs that the first one had already; nothing of it stays."""
        for job in self.jobs:
            self._warm_up_often(job, num_warmups - already * (job is self.jobs[0]), self.rehearsing)
            self.state.put_back_notes()

    def _warm_up_often(self, job: CaptureJob, num_warmups: int, context: Rehearsing = _REAL) -> None:
        for _ in range(num_warmups):
            if self._warm_up(job, context):
                break  # its capture will say why, and other sizes may do better

    def _capture_each(self, session: CaptureSession) -> None:
        """Observe the largest and the smallest; the others too, where these two read other memory."""
        jobs, table = self.jobs, self.table
        # A warmup shows what the first one reads, but for hooks, which it does not run.
        first = len(jobs) - 1 if self.observers and not table.hooks else 0
        compared = 0 if first else len(self.observers)
        observed = {jobs[first].label, jobs[-1].label} | {job.label for job in jobs if job.follows is not None}
        with capture_bar(len(jobs), table.device, show=table.config.progress and self._ranks.rank == 0) as bar:
            self._capture_or_fail(session, jobs, observed, bar)
            seen = self.observers[compared:]
            otherwise = len(seen) > 1 and seen[0].external.keys() != seen[-1].external.keys()
            # One may have done what no capture may come to.
            if self._ranks.any("what graphs read", otherwise or any(observer.refused for observer in seen)):
                again = [job for job in jobs if job.label not in observed and job.key in table.graphs]
                table.forget(again)
                self._capture_or_fail(session, again, {job.label for job in again})

    def _capture_or_fail(
        self, session: CaptureSession, jobs: Sequence[CaptureJob], observed: Container[str], bar: Any = None
    ) -> None:
        """Capture jobs, those that failed on any rank a second time after a warmup of their own; note what failed.

        Ranks meet once for all jobs: in between none waits for the slowest.
        """
        errors: dict[str, CaptureError] = {}
        for last, job in zip([None, *jobs], jobs, strict=False):
            if last is None or last.rows == job.rows:  # what an earlier capture noted, no replay may have done by then
                self.state.put_back_notes()
            if bar is not None:
                bar.set_postfix(size=job.rows, free=f"{self.table.device.free_memory() / 2**30:.1f} GiB")
            errors |= self._capture_one(session, job, observed=job.label in observed)
            if bar is not None:
                bar.update(job.label not in errors)
        errors = on_all_ranks(self.table, "capturing", jobs, errors)
        for job in jobs:
            if (error := errors.get(job.label)) is not None:
                self._failed |= self._try_again(session, job, error) if self.retry else {job.label: error}
                if bar is not None:
                    bar.set_postfix(failed=len(self._failed))
                    bar.update(job.label not in self._failed)

    def _try_again(self, session: CaptureSession, job: CaptureJob, error: CaptureError) -> dict[str, CaptureError]:
        """Capture a job after a warmup of its own; return what went wrong on any rank."""
        self.state.put_back()
        earlier, runs = copy.copy(self.state), len(self.observers)
        if self._warm_up(job, self.rehearsing):
            again = {job.label: error}
        else:
            if isinstance(error, EscapeError):
                self.state.remember()  # a cache that the warmup filled: the graph will read what is in it
            again = on_all_ranks(self.table, "capturing", [job], self._capture_one(session, job))
        if again or self.state.refuses:  # then nothing needs what the warmup changed
            self.state.go_back_to(earlier, [*self._traced, *self.observers[runs:]])
        return again

    def _capture_one(
        self, session: CaptureSession, job: CaptureJob, *, observed: bool = True
    ) -> dict[str, CaptureError]:
        """Capture a job into the table; return what went wrong on this rank, by label."""
        if job.follows is not None and job.follows not in self.table.graphs:
            return {}  # what failed there says it all
        try:
            for refused in filter(None, (job.refused, *(observer.refused for observer in self.observers))):
                raise capture_error(refused, job.label)
            trace = self._trace(job)
            seconds = self._ranks.seconds
            copies = self.table.constants.copies(job.key)
            host = HostCapture(self.table.device.torch_device, copies, job.name, job.arguments)
            try:
                for hooks in self.table.hooks:  # this comes last before the capture
                    hooks.before_capture(job.mode, job.descriptor)
            except Exception as error:
                raise capture_error(error, job.label) from error
            with torch.profiler.record_function(f"simplegraph.capture {job.label}"), seconds.timed("capture"):
                program = self._recorded(session, job, trace, host, observed)
            program.constants = list(host.served.values())
            try:
                support = self.table.support  # a piecewise graph may not hold attention that cannot be in one
                if job.mode is CudaGraphMode.PIECEWISE and not program.breaks and support < AttentionCGSupport.ALWAYS:
                    cause = f"the attention declares {support.name}, but the forward met no eager break"
                    raise CaptureError(_HELD_ATTENTION.format(job.label, cause), cause=cause)
                self.table.add(job, program)
            except BaseException:
                program.drop()  # nothing else knows of it
                raise
            self.reads |= host.reads
        except CaptureError as error:
            return {job.label: error}
        return {}

    def _recorded(
        self, session: CaptureSession, job: CaptureJob, trace: BreakTrace | None, host: HostCapture, observed: bool
    ) -> Program:
        try:
            return session.capture(
                lambda: self._run_captured(job, host, observed),
                label=job.label,
                generators=job.generators,
                trace=trace,
                state=self.state,
                observed=functools.partial(observed_tensors, self.observers),
                search=observed,
                wait=False,  # the driver instantiates it while the next one is captured
                follows=None if job.follows is None else self.table.graphs[job.follows].program,
                followed=job.key in self._followed,
                ended=job.ended,
            )
        except BaseException as error:
            if self.table.config.on_capture_failure != "raise":
                release_locals(error)
            take_back(session.left, self.state)
            raise
        finally:
            session.left.clear()

    def _run_captured(self, job: CaptureJob, host: HostCapture, observed: bool) -> Any:
        """Run the forward as it is recorded, hooks included."""
        observer = MemoryObserver(self.table.device, job.rows, self.observers[-1] if job.follows else None)
        constants = self.table.constants
        followed = observed or constants.met_host or job.arguments
        try:
            with (
                entered(constants.notes, as_captured=True),
                host.following(observer if observed else None) if followed else contextlib.nullcontext(),
                observer if observed else contextlib.nullcontext(),
            ):
                outputs = job.run()
                for hooks in self.table.hooks:
                    hooks.end_of_forward(job.mode, job.descriptor)
        finally:  # what one size did that no capture may come to, others would do, too, and are not observed
            self.observers += [observer] if observer.refused else []
        host.check_refused()
        self.observers += [observer] if observed else []
        return outputs

    def _warm_up(self, job: CaptureJob, context: Rehearsing = _REAL) -> dict[str, CaptureError]:
        """Run a job eagerly, so that its capture finds everything set up; return what went wrong on any rank."""
        return on_all_ranks(self.table, "warming up", [job], self._warm_up_here(job, self.observers, context))

    def _warm_up_here(
        self, job: CaptureJob, observers: list[MemoryObserver], context: Rehearsing
    ) -> dict[str, CaptureError]:
        try:
            traced = job.mode is CudaGraphMode.PIECEWISE
            notes = self.table.constants.notes

            def run() -> Any:  # where extras noted that eager's way is another: so it makes the same constants
                with entered(notes, as_captured=True) if notes else contextlib.nullcontext():
                    return job.run()

            with self._ranks.seconds.timed("warmup"), context() as before_write:
                _, observer, trace = run_observed(
                    *(self.table, run, job.key),
                    traced=traced,
                    rows=job.rows,
                    arguments=job.arguments,
                    before_write=before_write,
                )
            if trace is not None:
                self.table.add_trace(job.key, trace)
            if self._ranks.size > 1:
                self.table.device.synchronize()  # no collective may be in flight when a capture begins
        except InputError:
            raise
        except CaptureError as error:
            return {job.label: error}  # the library's own refusal
        except Exception as error:
            logger.debug("warming up %s failed: %s", job.label, error)
            self._raised |= {} if isinstance(error, WithheldError) else {job.label: error}  # no eager call raises it
            return {job.label: capture_error(error, job.label)}
        observers.append(observer)
        return {}

    def _trace(self, job: CaptureJob) -> BreakTrace | None:
        """Find what is known of the job's breaks, from a warmup of its own where another size's does not tell."""
        if job.mode is not CudaGraphMode.PIECEWISE:
            return None
        # A single one in the middle of serving may be of padded rows, and tells how arguments follow the batch.
        known = self.table.traces.get(job.key) if self.lazy else self.table.trace(job.key)
        if known is None:
            for error in self._warm_up_here(job, self._traced, self.rehearsing).values():
                raise error
            self.state.put_back_notes()
        return self.table.trace(job.key)


def capture_bar(total: int, device: GraphDevice, *, show: bool) -> Any:
    """Make the progress bar of captures; a context of None if it is hidden, as for one, and on ranks but the first."""
    # tqdm makes a lock that processes share, even for a hidden bar; processes that are killed leave it behind.
    if total < 2 or not show or os.environ.get("RANK", "") not in ("", "0"):
        return contextlib.nullcontext()
    return tqdm(total=total, desc=f"Capturing CUDA graphs{' (emulated)' * device.emulated}", unit="graph")
