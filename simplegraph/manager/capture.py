"""One session of a manager's captures: warmups, every job's graph, second tries, and what other ranks say of each."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from simplegraph.config import AttentionCGSupport, CudaGraphMode
from simplegraph.errors import CaptureError, InputError
from simplegraph.graph.breaks.operators import recording_breaks
from simplegraph.graph.breaks.recorder import BreakTrace
from simplegraph.graph.failures import capture_error
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.program import Program
from simplegraph.graph.session import CaptureSession
from simplegraph.graph.tensors import wait_collectives
from simplegraph.manager.jobs import CaptureJob, CaptureSummary, counters, observing, read_differently
from simplegraph.manager.progress import capture_bar

if TYPE_CHECKING:
    from simplegraph.manager.manager import CudaGraphManager

logger = logging.getLogger("simplegraph")


class JobCapture:
    """Captures jobs for a manager, which gets their programs; see `CudaGraphManager.capture_jobs`.

    Args:
        manager: whose graphs they will be.
        jobs: largest first.
        observers: gets what warmups and captures were seen to read.
        lazy: this is a single capture in the middle of serving.
    """

    def __init__(
        self, manager: CudaGraphManager, jobs: Sequence[CaptureJob], observers: list[MemoryObserver], *, lazy: bool
    ) -> None:
        self._manager, self._jobs, self._observers, self._lazy = manager, jobs, observers, lazy
        self._failed: dict[str, CaptureError] = {}
        self._traced: list[MemoryObserver] = []  # of warmups that only recording_breaks what breaks return

    def run(self, num_warmups: int) -> CaptureSummary:
        """Warm up on the first job, and capture them all."""
        manager, jobs = self._manager, self._jobs
        started = time.perf_counter()
        with manager.ranks.together():
            manager.ranks.begin(self._settings(num_warmups), ", ".join(job.label for job in jobs), manager.device)
        if not jobs:
            return CaptureSummary(0, self._failed, 0.0, 0)
        free_before, before = manager.device.free_memory(), manager.stats.captures
        with (
            manager.ranks.together(),
            CaptureSession(manager.device, manager.pool, thorough=not self._lazy) as session,
        ):
            for _ in range(num_warmups):
                if self._warm_up(jobs[0], self._observers) is not None:
                    break  # its capture will say why, and smaller sizes may do better
            self._capture_each(session)
        for job in jobs:
            if job.label in self._failed:
                manager.note_failure(job, self._failed[job.label])
        self._observers += self._traced
        taken = max(0, free_before - manager.device.free_memory())
        return CaptureSummary(manager.stats.captures - before, self._failed, time.perf_counter() - started, taken)

    def _capture_each(self, session: CaptureSession) -> None:
        """Watched are the largest and the smallest; the others too, where these two read other memory."""
        manager, jobs, observers = self._manager, self._jobs, self._observers
        show = manager.config.progress and len(jobs) > 1 and manager.ranks.rank == 0
        # A warmup shows what the first one reads, but for hooks, which it does not run.
        first = len(jobs) - 1 if observers and not manager.hooks else 0
        compared = 0 if first else len(observers)
        unseen = []
        with capture_bar(len(jobs), show) as bar:
            for index, job in enumerate(jobs):
                bar.next(job.descriptor.num_tokens, manager.device)
                watched = index in (first, len(jobs) - 1)
                unseen += [] if watched else [job]
                error = self._capture_one(session, job, observers if watched else None)
                if error is not None and not self._lazy and self._warm_up(job, observers) is None:
                    error = self._capture_one(session, job, observers)
                if error is not None:
                    self._failed[job.label] = error
            if manager.ranks.any("what graphs read", read_differently(observers[compared:])):
                again = [job for job in unseen if job.key in manager.programs]
                manager.forget(again)
                errors = {job.label: self._capture_one(session, job, observers) for job in again}
                self._failed |= {label: error for label, error in errors.items() if error is not None}

    def _settings(self, num_warmups: int) -> dict[str, str]:
        """What must be the same on ranks that capture together."""
        manager = self._manager
        names = (field.name for field in dataclasses.fields(manager.config) if field.name != "progress")
        settings = {name: repr(getattr(manager.config, name)) for name in names}
        more = {"support": manager.support.name, "lora_cases": manager.dispatcher.lora_cases, "warmups": num_warmups}
        return settings | {name: str(value) for name, value in (more | {"torch": torch.__version__}).items()}

    def _on_all_ranks(self, what: str, job: CaptureJob, error: CaptureError | None) -> CaptureError | None:
        """The error, or that of another rank: a graph that one rank does not have, no rank may replay."""
        failure = self._manager.ranks.failure(f"{what} {job.label}", error)
        if failure is None or error is not None:
            return error
        rank, found = failure
        self._manager.forget([job])
        cause = f"it failed on rank {rank}, and its collectives need all ranks"
        said = found.replace("\n", "\n  ")
        return CaptureError(f"{what} {job.label} failed on rank {rank}\n  {cause}:\n  {said}", cause=cause)

    def _warm_up(self, job: CaptureJob, observers: list[MemoryObserver]) -> CaptureError | None:
        """Run a job eagerly, so that its capture finds everything set up; what went wrong on any rank."""
        error = self._warm_up_here(job, observers)
        failed = None if error is None else capture_error(error, job.label)
        return self._on_all_ranks("warming up", job, failed)

    def _warm_up_here(self, job: CaptureJob, observers: list[MemoryObserver]) -> Exception | None:
        observer = MemoryObserver()
        trace = self._manager.traces.begin(observer) if job.mode is CudaGraphMode.PIECEWISE else None
        try:
            with observer, recording_breaks(trace):
                outputs = wait_collectives(job.run())
                if self._manager.ranks.size > 1:
                    self._manager.device.synchronize()  # no collective may be in flight when a capture begins
        except InputError:
            raise
        except Exception as error:
            logger.debug("warming up %s failed: %s", job.label, error)
            return error
        observers.append(observer)
        if trace is not None:
            self._manager.traces.add(job.key, trace, outputs)
        return None

    def _capture_one(
        self, session: CaptureSession, job: CaptureJob, observers: list[MemoryObserver] | None
    ) -> CaptureError | None:
        """Capture a job; what went wrong on any rank."""
        return self._on_all_ranks("capturing", job, self._capture_here(session, job, observers))

    def _capture_here(
        self, session: CaptureSession, job: CaptureJob, observers: list[MemoryObserver] | None
    ) -> CaptureError | None:
        run = self._with_end_hooks(job)
        if observers is not None:
            run = observing(run, observers)
        try:
            trace = self._trace(job)
            self._announce(job)
            with torch.profiler.record_function(f"simplegraph.capture {job.label}"):
                program = session.capture(run, label=job.label, generators=job.generators, trace=trace)
            self._check_breaks(job, program)
        except CaptureError as error:
            return error
        self._manager.programs[job.key] = program
        if self._manager.failures.pop(job.key, None) is not None:
            self._manager.stats.failures.pop(job.label, None)
        self._manager.stats.captured(job.key, counters(job, program))
        return None

    def _announce(self, job: CaptureJob) -> None:
        """Let the hooks get ready; this comes last before the capture."""
        try:
            for hooks in self._manager.hooks:
                hooks.before_capture(job.mode, job.descriptor)
        except Exception as error:
            raise capture_error(error, job.label) from error

    def _trace(self, job: CaptureJob) -> BreakTrace | None:
        """What is known of the job's breaks, from a warmup of its own where another size's does not tell."""
        if job.mode is not CudaGraphMode.PIECEWISE:
            return None
        if self._manager.traces.find(job.key) is None:
            error = self._warm_up_here(job, self._traced)
            if error is not None:
                raise capture_error(error, job.label)
        return self._manager.traces.find(job.key)

    def _check_breaks(self, job: CaptureJob, program: Program) -> None:
        """A piecewise graph must not hold attention that cannot be in one."""
        support = self._manager.support
        if job.mode is CudaGraphMode.PIECEWISE and support < AttentionCGSupport.ALWAYS and not program.breaks:
            program.drop()
            cause = f"the attention declares {support.name}, but the forward met no eager break"
            raise CaptureError(
                f"capturing {job.label} failed\n  {cause}: the graph would hold the attention.\n"
                "  Mark it with @simplegraph.eager_break, simplegraph.break_at, or by its operator in break_ops.",
                cause=cause,
            )

    def _with_end_hooks(self, job: CaptureJob) -> Callable[[], Any]:
        if not self._manager.hooks:
            return job.run

        def run() -> Any:
            outputs = job.run()
            for hooks in self._manager.hooks:
                hooks.end_of_forward(job.mode, job.descriptor)
            return outputs

        return run
