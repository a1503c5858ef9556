"""Capture the graphs of a model, from jobs to the table: warmups, capture sessions, second tries, other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Container, Sequence
from typing import Any

import torch
from tqdm import tqdm

from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import CaptureError, EscapeError, InputError
from simplegraph.base.failures import MODE_OUTSIDE, capture_error, release_locals
from simplegraph.base.nested import WithheldError
from simplegraph.base.tensors import wait_collectives
from simplegraph.device.protocol import GraphDevice
from simplegraph.manager.stats import CaptureSummary
from simplegraph.manager.table import OTHERS_TOO, CaptureJob, ProgramTable, on_all_ranks
from simplegraph.program.breaks.break_calls import BreakTrace
from simplegraph.program.breaks.marks import name_of
from simplegraph.program.probes import Probe, Run, Undone, around, undo
from simplegraph.program.program import Program
from simplegraph.program.session import CaptureSession

logger = logging.getLogger("simplegraph")
_ALL_OBSERVED = 8  # up to so many sizes are all observed, which takes some milliseconds of each
_HELD_ATTENTION = (
    "capturing {} failed\n  {}: the graph would hold the attention.\n"
    "  Mark it with @simplegraph.eager_break or simplegraph.break_at, or tag its operator cudagraph_unsafe."
)
_BREAK_IN_STEP = (
    "capturing {} failed\n  {}, and would find gradients of the step before: a replay sets them at its end.\n"
    "  Do its work on the device (torch.where), or before or after the step; or wrap parts of the model in place of "
    "the step: simplegraph.wrap(part, training=True)."
)

_FLAG_REMEDY = (
    "Fill it for each batch size before capture. Or set padding=False and capture lazily (no capture_graphs), so that "
    "each batch size first runs eagerly."
)


@dataclasses.dataclass(eq=False)
class GraphCapture:
    """Captures jobs in one session, and adds their Programs to the table.

    If a job fails, its changes are undone and the other jobs are captured. A job that failed without a warmup of its
    own gets a warmup and a second try: autotuners need that.

    Args:
        table: the table for the Programs.
        jobs: the graphs to capture, largest first, so that smaller graphs reuse the pool's memory.
        settings: further settings that must be equal on all ranks, beside the configuration.
        lazy: True for a single capture while serving.
        retry: True to give jobs that failed a warmup of their own and a second try.
        probes: probes to call after those of the table; see `simplegraph.program.probes`.

    Attributes:
        runs: recordings, and warmups that succeeded, in order.
    """

    table: ProgramTable
    jobs: Sequence[CaptureJob]
    settings: dict[str, Any]
    lazy: bool = False
    retry: bool = True
    probes: Sequence[Probe] = ()
    _failed: dict[str, CaptureError] = dataclasses.field(default_factory=dict)
    _raised: dict[str, Exception] = dataclasses.field(default_factory=dict)  # errors of eager runs, by label
    runs: list[Run] = dataclasses.field(default_factory=list, init=False)
    _traced: list[Run] = dataclasses.field(default_factory=list)  # warmups that traced breaks

    def __post_init__(self) -> None:
        self._ranks = self.table.ranks
        self.probes = [*self.table.probes, *self.probes]
        following = [at for at, job in enumerate(self.jobs) if job.follows is not None]
        self._followed = {job.key for job in self.jobs[: max(following, default=0)]}

    def run(self, num_warmups: int = 0, rehearsals: int = 0) -> CaptureSummary:
        """Warm up the first job, or each job `num_warmups` times if that is above 1, then capture all jobs.

        Args:
            num_warmups: eager runs whose effects stay.
            rehearsals: eager runs of each job whose effects are undone; the warmups of a job count as rehearsals.

        Raises:
            ConfigError: ranks differ in their settings.
            Exception: raised by the forward itself, if no job can run even eagerly: the inputs are wrong then.
        """
        table, jobs, ranks = self.table, self.jobs, self._ranks
        started = time.perf_counter()
        ranks.seconds.clear()
        with ranks.together():
            names = [field.name for field in dataclasses.fields(table.config) if field.name != "progress"]
            settings = {
                "support": table.support.name,
                **self.settings,
                "warmups": num_warmups,
                "torch": torch.__version__,
            }
            shared = {name: repr(getattr(table.config, name)) for name in names} | {
                k: str(v) for k, v in settings.items()
            }
            ranks.begin(shared, ", ".join(job.label for job in jobs), table.device)
        if not jobs:
            return CaptureSummary(failed=self._failed, switched_off=table.config.mode is CudaGraphMode.NONE)
        free_before, before = table.device.free_memory(), table.stats.captures
        with table.releasing_unused_pool():
            self._run_session(num_warmups, rehearsals)
            if ranks.any("done flags of recordings", any(probe.sets_flags for probe in self.probes)):
                self._capture_again()
        memory = any(isinstance(error, torch.OutOfMemoryError) for error in self._raised.values())
        if ranks.size == 1 and not self.lazy and not memory and all(job.label in self._raised for job in jobs):
            raise self._raised[jobs[0].label]
        captured = table.stats.captures - before
        others = f"{captured or 'no'} other size{'s were' if captured > 1 else ' was'} captured"
        outcome = OTHERS_TOO if self.lazy else others
        table.add_failures({job: self._failed[job.label] for job in jobs if job.label in self._failed}, outcome)
        taken = max(0, free_before - table.device.free_memory())
        return CaptureSummary(captured, self._failed, time.perf_counter() - started, taken, dict(ranks.seconds))

    def inspect(self, summary: CaptureSummary) -> CaptureSummary:
        """Let probes inspect the graphs and drop some; return the summary of the graphs that remain.

        Call it when the captures can no longer be undone.
        """
        for probe in reversed(self.probes):
            summary = probe.inspect(self, summary)
        return summary

    def _run_session(self, num_warmups: int, rehearsals: int) -> None:
        table, jobs = self.table, self.jobs
        with self._ranks.together(), CaptureSession(table.device, table.pool, thorough=not self.lazy) as session:
            for job in jobs if num_warmups > 1 else jobs[:1]:
                self._warm_up_often(job, num_warmups)
            for probe in self.probes:
                probe.before_captures()
            for job in jobs if rehearsals else ():
                self._warm_up_often(job, rehearsals - num_warmups * (job is jobs[0]), rehearsed=True)
                undo(self.probes, Undone.RUN)
            try:
                self._capture_each(session)
            finally:  # also if a job failed
                undo(self.probes, Undone.RUN)
                unready = {}
                with self._ranks.seconds.timed("instantiate"):
                    for job in (job for job in jobs if job.key in table.graphs):
                        try:
                            table.graphs[job.key].program.wait()
                        except Exception as error:
                            unready[job.label] = capture_error(error, job.label, trains=job.trains)
            dropped = on_all_ranks(table, "instantiating", jobs, unready)
            table.forget([job for job in jobs if job.label in dropped])
            self._failed |= dropped

    def _capture_again(self) -> None:
        """Capture again: if a recording sets the same done flag again, every run does, and no replay would."""
        jobs, table = self.jobs, self.table
        table.forget(jobs)
        undo(self.probes, Undone.RECORDINGS)
        self._failed.clear()
        self._run_session(0, 0)
        names = [name for probe in self.probes for name in probe.set_twice()]
        if self._ranks.any("done flags of recordings, twice", bool(names)):
            table.forget(jobs)
            flags = ", ".join(names[:5]) or "a flag on another rank"
            cause = (
                f"the recording sets {flags}, which tells later calls that work was done, and a recording does no work"
            )
            remedy = MODE_OUTSIDE if names and all(name.endswith("training") for name in names) else _FLAG_REMEDY
            text = f"the graph of {{}} is dropped\n  {cause}.\n  {remedy}"
            self._failed |= {job.label: CaptureError(text.format(job.label), cause=cause) for job in jobs}

    def _warm_up_often(self, job: CaptureJob, num_warmups: int, *, rehearsed: bool = False) -> None:
        for _ in range(num_warmups):
            if self._warm_up(job, rehearsed=rehearsed):
                break  # the job's capture reports the error, and other jobs may succeed

    def _capture_each(self, session: CaptureSession) -> None:
        """Capture all jobs. Of many, observe the largest and the smallest, and the others if these two differ.

        Graphs that were not observed are compared before each launch.
        """
        jobs, table = self.jobs, self.table
        # A warmup shows the memory that the first job reads, except by hooks: warmups run none.
        first = len(jobs) - 1 if self.runs and not table.hooks else 0
        extremes = {first, len(jobs) - 1}
        observed = {
            job.label
            for at, job in enumerate(jobs)
            if at in extremes or job.follows is not None or len(jobs) <= _ALL_OBSERVED
        }
        with capture_bar(len(jobs), table.device, show=table.config.progress and self._ranks.rank == 0) as bar:
            self._capture_or_fail(session, jobs, observed, bar)
            distrusted = any(probe.distrusts for probe in self.probes)
            if self._ranks.any("what graphs read", distrusted):
                again = [job for job in jobs if job.label not in observed and job.key in table.graphs]
                table.forget(again)
                self._capture_or_fail(session, again, {job.label for job in again})

    def _capture_or_fail(
        self, session: CaptureSession, jobs: Sequence[CaptureJob], observed: Container[str], bar: Any = None
    ) -> None:
        """Capture jobs; give those that failed on any rank a second try, and note the failures.

        Ranks exchange failures once for all jobs, instead of waiting for the slowest rank after each job.
        """
        errors: dict[str, CaptureError] = {}
        undo(self.probes, Undone.RUN)  # done flags of earlier runs count for none of these jobs
        for job in jobs:
            if bar is not None:
                bar.set_postfix(size=job.padded, free=f"{self.table.device.free_memory() / 2**30:.1f} GiB")
            errors |= self._capture_one(session, self._new_run(job, recorded=True, observed=job.label in observed))
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
        """Capture a job after a warmup of its own; return the errors of all ranks."""
        undo(self.probes, Undone.RECORDINGS)
        before = len(self.runs)
        if self._warm_up(job, rehearsed=True):
            again = {job.label: error}
        else:
            if isinstance(error, EscapeError):
                for probe in self.probes:  # the warmup may have filled a cache, which the graph will read
                    probe.before_captures(again=True)
            recorded = self._capture_one(session, self._new_run(job, recorded=True))
            again = on_all_ranks(self.table, "capturing", [job], recorded)
        if again or any(probe.refuses for probe in self.probes):  # no graph needs the warmup's changes
            undo(self.probes, Undone.SECOND_TRY, [*self._traced, *self.runs[before:]])
        return again

    def _new_run(
        self, job: CaptureJob, *, recorded: bool = False, rehearsed: bool = False, observed: bool = True
    ) -> Run:
        # If probes noted that eager runs take other branches, warmups take the branches of recordings.
        as_recorded = recorded or bool(self.table.constants.probe_counts)
        return Run(job.key, job, job.label, job.padded, recorded, as_recorded, rehearsed, observed)

    def _capture_one(self, session: CaptureSession, run: Run) -> dict[str, CaptureError]:
        """Capture a job into the table; return the error on this rank, by label."""
        job: CaptureJob = run.job
        if job.follows is not None and job.follows not in self.table.graphs:
            return {}  # the failure of the earlier job is reported
        try:
            for probe in self.probes:
                probe.before_capture(run)
            trace = self._trace(job)
            if trace is not None and trace.calls and job.trains:
                cause = f"eager break {name_of(trace.calls[0].function)} is called in a training step"
                raise CaptureError(_BREAK_IN_STEP.format(job.label, cause), cause=cause)
            try:
                for hooks in self.table.hooks:  # directly before the capture
                    hooks.before_capture(job.mode, job.descriptor)
            except Exception as error:
                raise capture_error(error, job.label, trains=job.trains) from error
            seconds = self._ranks.seconds
            with torch.profiler.record_function(f"simplegraph.capture {job.label}"), seconds.timed("capture"):
                program = self._record(session, run, trace)
            try:
                support = self.table.support  # attention without full support must not be in a piecewise graph, either
                if job.mode is CudaGraphMode.PIECEWISE and not program.breaks and support < AttentionCGSupport.ALWAYS:
                    cause = f"the attention declares {support.name}, but the forward met no eager break"
                    raise CaptureError(_HELD_ATTENTION.format(job.label, cause), cause=cause)
                self.table.add(job, program)
            except BaseException:
                program.drop()  # nothing else refers to it
                raise
        except CaptureError as error:
            return {job.label: error}
        return {}

    def _record(self, session: CaptureSession, run: Run, trace: BreakTrace | None) -> Program:
        job: CaptureJob = run.job
        self.runs.append(run)
        try:
            return session.capture(
                lambda: self._run_captured(run),
                about=run,
                probes=self.probes,
                generators=job.generators,
                trace=trace,
                follows=None if job.follows is None else self.table.graphs[job.follows].program,
                followed=job.key in self._followed,
            )
        except BaseException as error:
            if self.table.config.on_capture_failure != "raise":
                release_locals(error)
            undo(self.probes, Undone.RECORDING, [run])
            raise

    def _run_captured(self, run: Run) -> Any:
        """Run the forward in a recording, hooks included."""
        job: CaptureJob = run.job
        with around(self.probes, run):
            outputs = job.run()
            for hooks in self.table.hooks:
                hooks.end_of_forward(job.mode, job.descriptor)
        return outputs

    def _warm_up(self, job: CaptureJob, *, rehearsed: bool) -> dict[str, CaptureError]:
        """Run a job eagerly, so that libraries and caches are initialized at its capture; return all ranks' errors."""
        run = self._new_run(job, rehearsed=rehearsed)
        errors = self._warm_up_here(run)
        if not errors:
            self.runs.append(run)
        return on_all_ranks(self.table, "warming up", [job], errors)

    def _warm_up_here(self, run: Run) -> dict[str, CaptureError]:
        job: CaptureJob = run.job
        try:
            with self._ranks.seconds.timed("warmup"), around(self.probes, run):
                run.outputs = wait_collectives(job.run())
            if run.trace is not None:
                self.table.add_trace(job.key, run.trace)
            if self._ranks.size > 1:
                self.table.device.synchronize()  # no collective may be in flight when a capture begins
        except InputError:
            raise
        except CaptureError as error:
            return {job.label: error}  # a refusal by this library
        except Exception as error:
            logger.debug("warming up %s failed: %s", job.label, error)
            self._raised |= {} if isinstance(error, WithheldError) else {job.label: error}  # no eager call raises it
            return {job.label: capture_error(error, job.label, trains=job.trains)}
        finally:
            run.outputs = None  # release its memory
        return {}

    def _trace(self, job: CaptureJob) -> BreakTrace | None:
        """Return the trace of the job's breaks; make it by a warmup if no trace of another size applies."""
        if job.mode is not CudaGraphMode.PIECEWISE:
            return None
        # A capture while serving may have padding rows: only a trace of its own size shows the batch dimensions.
        trace = self.table.traces.get(job.key) if self.lazy else self.table.trace(job.key)
        if trace is None:
            run = self._new_run(job, rehearsed=True)
            for error in self._warm_up_here(run).values():
                raise error
            self._traced.append(run)
            undo(self.probes, Undone.RUN)
        return self.table.trace(job.key)


def capture_bar(total: int, device: GraphDevice, *, show: bool) -> Any:
    """Make the progress bar of captures; a null context for a single capture, on ranks above 0, and if it is hidden.

    It is also hidden if stderr is no terminal: logs would hold a line for each of its updates.
    """
    # Even for a hidden bar, tqdm makes a lock that processes share, and that killed processes leave behind.
    if total < 2 or not show or os.environ.get("RANK", "") not in ("", "0"):
        return contextlib.nullcontext()
    if sys.stderr is None or not sys.stderr.isatty():
        return contextlib.nullcontext()
    return tqdm(total=total, desc=f"Capturing CUDA graphs{' (emulated)' * device.emulated}", unit="graph")
