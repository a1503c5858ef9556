"""Captures, keeps and replays Programs: one for each key. For engines that own their loop and buffers.

manager = CudaGraphManager(device="cuda", capture_sizes=[1, 2, 4, 8])
manager.capture(run_model)                      # run_model(mode, descriptor) reads the engine's buffers
...
batch = manager.dispatch(num_tokens=5)          # -> mode, padded descriptor, reason
fill_buffers(batch.descriptor)
hidden = manager.run(batch, run_model)          # replays; runs eagerly where nothing was captured
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from simplegraph.batch.dispatch import BatchDescriptor, Dispatch, Dispatcher
from simplegraph.batch.reasons import Reason
from simplegraph.config import AttentionCGSupport, CudaGraphConfig, CudaGraphMode
from simplegraph.context import bypassed
from simplegraph.distributed import Alone, Consensus, RankGroup, ShapeConsensus, Vote
from simplegraph.errors import CaptureError, ConfigError, InputError, ReplayError
from simplegraph.graph.breaks import told
from simplegraph.graph.device import GraphDevice, GraphPool
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.program import Program
from simplegraph.graph.recorder import Trace
from simplegraph.graph.select import graph_device
from simplegraph.graph.session import CaptureSession, capture_error
from simplegraph.graph.subclasses import waited
from simplegraph.jobs import (
    CaptureJob,
    CaptureSummary,
    Forward,
    Key,
    MemoryEstimate,
    Traces,
    bound,
    counters,
    observing,
    own,
    read_differently,
)
from simplegraph.progress import capture_bar
from simplegraph.report import GraphReport
from simplegraph.stats import GraphStats

logger = logging.getLogger("simplegraph")


class GraphHooks:
    """What a library beside this one may do around a captured run. Override what is needed.

    Attention backends plan in `before_replay`; an offloader joins its copy stream in `end_of_forward`.

    Attributes:
        support: what its part of the forward can do in a full graph.
    """

    support: AttentionCGSupport = AttentionCGSupport.ALWAYS

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Outside the capture, before it begins: set up what this descriptor's graph will read."""

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Outside the graph, before every replay: refresh what the graph reads."""

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Inside the capture, after the forward: whatever runs here is recorded."""


class _ReplayedByAll(GraphHooks):
    """Refuses a replay whose collectives have no process group any more or, with `debug`, meet another replay's."""

    def __init__(self, ranks: RankGroup, *, debug: bool) -> None:
        self._ranks = ranks
        self._debug = debug

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._ranks.check_alive()
        if self._debug:
            self._ranks.any(f"a {mode.name} replay of {descriptor}", True)


class CudaGraphManager:
    """Programs by key: captures them, replays them, runs eagerly where there is none, and counts it all.

    Args:
        config: what to capture; fields can also be given as keywords.
        device: where, as a torch device or a `GraphDevice`.
        pool: memory to share with other managers, whose graphs then never run at the same time.
        support: what the attention inside the forward can do in a full graph.
        lora_cases: the counts of active LoRAs to capture.
        requests: whether full graphs for mixed batches are keyed by their number of requests; see `Dispatcher`.
        name: what messages and the report call it.
        ranks: those whose graphs hold collectives with this one's; they capture together.
        consensus: lets ranks agree on every step's mode and size; `dispatch` then asks all of them. Give `ranks` too,
            so that all have the same graphs.

    Raises:
        ConfigError: a setting is invalid.
    """

    def __init__(
        self,
        config: CudaGraphConfig | None = None,
        *,
        device: torch.device | str | GraphDevice,
        pool: GraphPool | None = None,
        support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
        lora_cases: Sequence[int] = (0,),
        requests: bool | None = None,
        name: str = "model",
        ranks: RankGroup | None = None,
        consensus: Consensus | None = None,
        **settings: Any,
    ) -> None:
        self.config = (config or CudaGraphConfig()).replace(**settings).from_env()
        self.device = graph_device(device)
        if pool is not None and pool.device is not self.device:
            raise ConfigError(f"the pool belongs to {pool.device.torch_device}, not to {self.device.torch_device}.")
        if not isinstance(support, AttentionCGSupport):
            raise ConfigError(f"support is {support!r}; expected an AttentionCGSupport, such as backend.support.")
        self.dispatcher = Dispatcher(self.config, support, lora_cases=lora_cases, requests=requests)
        self.support = support
        self.ranks: RankGroup | Alone = ranks or Alone()
        if consensus is not None and not self.config.padding:
            raise ConfigError("padding is False, but ranks that agree on a size pad to the largest; allow padding.")
        alone = isinstance(consensus, ShapeConsensus) and consensus.size == 1
        self.consensus = None if alone else consensus
        self.stats = GraphStats(name)
        self.programs: dict[Key, Program] = {}
        self.failures: dict[Key, CaptureError] = {}
        self.traces = Traces(self.device.torch_device, self.config.break_ops)
        self.hooks: list[GraphHooks] = [] if ranks is None else [_ReplayedByAll(ranks, debug=self.config.debug)]
        self._traced: list[MemoryObserver] = []  # of warmups that only told what breaks return
        self.pool = self.device.new_pool() if pool is None else pool
        if pool is None or pool.managers:  # else somebody else made it, and may use it in other ways
            self.pool.managers.add(self)
        self._owned: dict[Key, Any] = {}

    # For engines.

    def add_hooks(self, hooks: GraphHooks) -> None:
        """Call these hooks around every capture and replay from now on.

        Raises:
            ConfigError: something was captured without them, or the manager was made for more than they support.
        """
        if not isinstance(hooks, GraphHooks):
            raise ConfigError(f"hooks is {type(hooks).__name__}; expected a GraphHooks, such as an attention backend.")
        if self.programs:
            raise ConfigError("graphs were captured without these hooks; add hooks before capture, or reset() first.")
        if hooks.support < self.support:
            raise ConfigError(
                f"{type(hooks).__name__} supports {hooks.support.name}, the manager was made for {self.support.name}; "
                "pass support=backend.support to CudaGraphManager."
            )
        self.hooks.append(hooks)

    def dispatch(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform_query_len: int | None = None,
        num_active_loras: int = 0,
        *,
        allow_full: bool = True,
    ) -> Dispatch:
        """How to run a batch; see `Dispatcher.dispatch`.

        With a `consensus` it is how all ranks run this step, eagerly too: each must ask, once a step. A rank with
        nothing to run asks for 0 tokens, and runs a batch of padding.

        Raises:
            RankError: no agreement came about.
            CaptureSizeError: the batch is empty, with a consensus on every rank.
            InputError: the numbers do not fit each other.
        """
        asked = (num_tokens, num_reqs, uniform_query_len, num_active_loras)
        if self.consensus is None:
            return self.dispatcher.dispatch(*asked, allow_full=allow_full)
        own = self.dispatcher.dispatch(*asked, allow_full=allow_full) if num_tokens else None
        agreed = self.consensus.agree(self._vote(own))
        if own is not None and agreed == self._vote(own):
            return own if agreed.mode is own.mode else self._eager(own)
        return self.dispatcher.agreed(*agreed, num_tokens=num_tokens)

    def _vote(self, own: Dispatch | None) -> Vote:
        """How this rank could run: a graph that it does not have, nobody may replay."""
        if own is None:
            return Vote(CudaGraphMode.FULL, 0)
        captured = (own.mode, own.descriptor) in self.programs
        mode = own.mode if captured else CudaGraphMode.NONE
        return Vote(mode, own.descriptor.num_tokens, own.descriptor.num_active_loras)

    def _eager(self, own: Dispatch) -> Dispatch:
        """The batch in its padded shape, run eagerly for want of a graph."""
        return own._replace(mode=CudaGraphMode.NONE, reason=self._why_uncaptured((own.mode, own.descriptor)))

    def _why_uncaptured(self, key: Key) -> Reason:
        return Reason.CAPTURE_FAILED if key in self.failures else Reason.NOT_CAPTURED_UPFRONT

    def descriptors(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        """Everything that `capture` captures, largest first."""
        return self.dispatcher.descriptors()

    def needs_capture(self) -> bool:
        """Whether any descriptor has neither been captured nor failed to be."""
        return any(key not in self.programs and key not in self.failures for key in self.descriptors())

    def capture(self, forward: Forward) -> CaptureSummary:
        """Capture every descriptor that is not captured yet, largest first, after warming up on the largest.

        Args:
            forward: called as ``forward(mode, descriptor)``; runs the model on the engine's own buffers,
                of ``descriptor.num_tokens`` rows, whose addresses must not change afterwards.

        Raises:
            CaptureError: one failed and ``on_capture_failure`` is "raise"; the others are captured. Or the
                stream is being captured already.
            InputError: the forward is a generator or a coroutine.
        """
        jobs = [
            CaptureJob((mode, descriptor), mode, descriptor, bound(forward, mode, descriptor))
            for mode, descriptor in self.descriptors()
            if (mode, descriptor) not in self.programs and (mode, descriptor) not in self.failures
        ]
        observers: list[MemoryObserver] = []
        summary = self.capture_jobs(jobs, num_warmups=self.config.num_warmups, observers=observers)
        self._owned.setdefault("engine", []).extend(own(observers))
        self._raise_failures(summary)
        return summary

    def run(self, batch: Dispatch, forward: Forward) -> Any:
        """Replay the batch's graph, or run `forward` eagerly where there is none.

        Returns:
            What the forward returned when captured, padding rows included; graph memory, valid until the
            next replay of any graph in the pool.
        """
        key = (batch.mode, batch.descriptor)
        program = self.programs.get(key)
        capturing = self.device.is_capturing()
        if program is not None and not capturing:
            return self._replay(key, program, batch.padding)
        reason = batch.reason
        if capturing:
            reason = Reason.CAPTURING_ELSEWHERE
        elif batch.mode is not CudaGraphMode.NONE:
            reason = self._why_uncaptured(key)
        self.stats.ran_eagerly(reason)
        return forward(CudaGraphMode.NONE, batch.descriptor)

    def replay(self, batch: Dispatch) -> Any:
        """Replay the batch's graph.

        Raises:
            ReplayError: nothing was captured for it; `run` falls back to eager instead.
        """
        key = (batch.mode, batch.descriptor)
        if key not in self.programs:
            raise ReplayError(
                f"no graph was captured for {batch.descriptor} in mode {batch.mode.name}; capture it, or use run()."
            )
        return self._replay(key, self.programs[key], batch.padding)

    def memory_estimate(self, forward: Forward) -> MemoryEstimate:
        """Capture the two largest descriptors into a pool of their own, measure, and drop them again.

        The forward runs `num_warmups` times for real, as `capture` would run it.

        Raises:
            CaptureError: one of the two cannot be captured.
        """
        todo = self.descriptors()
        trial = CudaGraphManager(self.config.replace(progress=False), device=self.device, name=self.stats.name)
        trial.hooks = self.hooks
        try:
            jobs = [CaptureJob(key, *key, bound(forward, *key)) for key in todo[:2]]
            for error in trial.capture_jobs(jobs, num_warmups=self.config.num_warmups).failed.values():
                raise error  # nothing was measured, so 0 bytes would be no estimate
            sizes = [trial.stats.graphs[key].bytes for key in todo[:2]]
        finally:
            trial.reset()
        return MemoryEstimate(len(todo), *[*sizes, 0, 0][:2])

    def report(self) -> GraphReport:
        """What was captured, replayed and run eagerly; print it, or ask it for JSON."""
        return GraphReport(self.stats, str(self.device.torch_device), emulated=self.device.emulated)

    def reset(self) -> None:
        """Drop every graph and what they own, all at once: graphs may share a cuBLAS workspace."""
        with self.pool.lock:
            if self.programs:
                self.device.synchronize()  # a graph still running must not lose its memory
            for program in self.programs.values():
                program.drop()
            self.programs.clear()
            self.failures.clear()
            self.traces.clear()
            self._owned.clear()
            self.stats.dropped()
            if self.pool.managers and not any(manager.programs for manager in self.pool.managers):
                # In place: managers that share the pool go on with it.
                self.device.release_pool(self.pool)
                self.pool.handle = self.device.new_pool().handle

    # For wrappers.

    def capture_jobs(
        self,
        jobs: Sequence[CaptureJob],
        *,
        num_warmups: int = 0,
        observers: list[MemoryObserver] | None = None,
        lazy: bool = False,
    ) -> CaptureSummary:
        """Capture several graphs in one session.

        A capture is transactional: where one fails, everything is put back and the others go on. A size
        that failed without a warmup of its own gets one and a second try: autotuners need it.

        Args:
            jobs: largest first, so that the smaller ones reuse the pool's memory.
            num_warmups: eager runs of the first job before anything is captured.
            observers: gets what the warmup and the captures were seen to read. Looking costs time, so where
                the largest and the smallest size read the same memory, the others are taken to do so too.
            lazy: this is a single capture in the middle of serving.
        """
        started = time.perf_counter()
        failed: dict[str, CaptureError] = {}
        observers = [] if observers is None else observers
        with self.ranks.together():
            self.ranks.begin(self._settings(num_warmups), ", ".join(job.label for job in jobs), self.device)
        if not jobs:
            return CaptureSummary(0, failed, 0.0, 0)
        free_before = self.device.free_memory()
        before = self.stats.captures
        show = self.config.progress and len(jobs) > 1 and self.ranks.rank == 0
        with self.ranks.together(), CaptureSession(self.device, self.pool, thorough=not lazy) as session:
            for _ in range(num_warmups):
                if self._warm_up(jobs[0], observers) is not None:
                    break  # its capture will say why, and smaller sizes may do better
            with capture_bar(len(jobs), show) as bar:
                # A warmup shows what the first one reads, but for hooks, which it does not run.
                first = len(jobs) - 1 if observers and not self.hooks else 0
                compared = 0 if first else len(observers)
                unseen = []
                for index, job in enumerate(jobs):
                    bar.next(job.descriptor.num_tokens, self.device)
                    watched = index in (first, len(jobs) - 1)
                    unseen += [] if watched else [job]
                    error = self._capture_one(session, job, observers if watched else None)
                    if error is not None and not lazy and self._warm_up(job, observers) is None:
                        error = self._capture_one(session, job, observers)
                    if error is not None:
                        failed[job.label] = error
                if self.ranks.any("what graphs read", read_differently(observers[compared:])):
                    again = [job for job in unseen if job.key in self.programs]
                    self.forget(again)
                    errors = {job.label: self._capture_one(session, job, observers) for job in again}
                    failed |= {label: error for label, error in errors.items() if error is not None}
        for job in jobs:
            if job.label in failed:
                self._failed(job, failed[job.label])
        observers += self._traced
        self._traced = []
        return CaptureSummary(
            self.stats.captures - before,
            failed,
            time.perf_counter() - started,
            max(0, free_before - self.device.free_memory()),
        )

    def _settings(self, num_warmups: int) -> dict[str, str]:
        """What must be the same on ranks that capture together."""
        names = (field.name for field in dataclasses.fields(self.config) if field.name != "progress")
        settings = {name: repr(getattr(self.config, name)) for name in names}
        more = {"support": self.support.name, "lora_cases": self.dispatcher.lora_cases, "warmups": num_warmups}
        return settings | {name: str(value) for name, value in (more | {"torch": torch.__version__}).items()}

    def _on_all_ranks(self, what: str, job: CaptureJob, error: CaptureError | None) -> CaptureError | None:
        """The error, or that of another rank: a graph that one rank does not have, no rank may replay."""
        failure = self.ranks.failure(f"{what} {job.label}", error)
        if failure is None or error is not None:
            return error
        rank, found = failure
        self.forget([job])
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
        trace = self.traces.begin(observer) if job.mode is CudaGraphMode.PIECEWISE else None
        try:
            with observer, told(trace):
                outputs = waited(job.run())
                if self.ranks.size > 1:
                    self.device.synchronize()  # no collective may be in flight when a capture begins
        except InputError:
            raise
        except Exception as error:
            logger.debug("warming up %s failed: %s", job.label, error)
            return error
        observers.append(observer)
        if trace is not None:
            self.traces.add(job.key, trace, outputs)
        return None

    def forget(self, jobs: Iterable[CaptureJob]) -> None:
        """Drop these jobs' programs as if they had not been captured."""
        for job in jobs:
            program = self.programs.pop(job.key, None)
            if program is not None:
                program.drop()
                self.stats.uncaptured(job.key)

    def refuse(self, jobs: Sequence[CaptureJob], cause: str, summary: CaptureSummary) -> CaptureSummary:
        """Count these jobs as failed for a reason that only shows after the capture."""
        failed = {}
        for job in jobs:
            remedy = "Return it instead, or copy it into a buffer of the module."
            failed[job.label] = CaptureError(f"capturing {job.label} failed\n  {cause}.\n  {remedy}", cause=cause)
            self._failed(job, failed[job.label])
        return dataclasses.replace(summary, captured=0, failed=failed)

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
        self.programs[job.key] = program
        if self.failures.pop(job.key, None) is not None:
            self.stats.failures.pop(job.label, None)
        self.stats.captured(job.key, counters(job, program))
        return None

    def _announce(self, job: CaptureJob) -> None:
        """Let the hooks get ready; this comes last before the capture."""
        try:
            for hooks in self.hooks:
                hooks.before_capture(job.mode, job.descriptor)
        except Exception as error:
            raise capture_error(error, job.label) from error

    def _trace(self, job: CaptureJob) -> Trace | None:
        """What is known of the job's breaks, from a warmup of its own where another size's does not tell."""
        if job.mode is not CudaGraphMode.PIECEWISE:
            return None
        if self.traces.find(job.key) is None:
            error = self._warm_up_here(job, self._traced)
            if error is not None:
                raise capture_error(error, job.label)
        return self.traces.find(job.key)

    def _check_breaks(self, job: CaptureJob, program: Program) -> None:
        """A piecewise graph must not hold attention that cannot be in one."""
        if job.mode is CudaGraphMode.PIECEWISE and self.support < AttentionCGSupport.ALWAYS and not program.breaks:
            program.drop()
            cause = f"the attention declares {self.support.name}, but the forward met no eager break"
            raise CaptureError(
                f"capturing {job.label} failed\n  {cause}: the graph would hold the attention.\n"
                "  Mark it with @simplegraph.eager_break, simplegraph.break_at, or by its operator in break_ops.",
                cause=cause,
            )

    def _with_end_hooks(self, job: CaptureJob) -> Callable[[], Any]:
        if not self.hooks:
            return job.run

        def run() -> Any:
            outputs = job.run()
            for hooks in self.hooks:
                hooks.end_of_forward(job.mode, job.descriptor)
            return outputs

        return run

    def _failed(self, job: CaptureJob, error: CaptureError) -> None:
        self.failures[job.key] = error
        self.stats.failures[job.label] = str(error)
        if self.config.on_capture_failure == "eager":
            logger.warning("%s\n  %s now runs eagerly; other sizes are unaffected.", error, job.label.capitalize())

    def _raise_failures(self, summary: CaptureSummary) -> None:
        if summary.failed and self.config.on_capture_failure == "raise":
            raise next(iter(summary.failed.values()))

    def _replay(self, key: tuple[CudaGraphMode, BatchDescriptor], program: Program, padding: int) -> Any:
        for hooks in self.hooks:
            hooks.before_replay(*key)
        with self.pool.lock:
            self.order_streams()
            if program.breaks or profiler_enabled():
                with replay_range(key), around_breaks(program):
                    program.replay()
            else:  # two contexts that do nothing would cost a microsecond
                program.replay()
        counters = self.stats.graphs[key]
        counters.replays += 1
        counters.padded_tokens += padding
        return program.result()

    def order_streams(self) -> None:
        """Let the current stream wait for the one that used the pool last. Call with the pool's lock held."""
        stream = self.device.current_stream()
        if stream != self.pool.stream:
            self.device.wait_for(self.pool.stream)
            self.pool.stream = stream


def replay_range(key: Key) -> contextlib.AbstractContextManager[Any]:
    """A profiler (and, under ``emit_nvtx``, NVTX) range around a replay; nothing when no profiler runs."""
    if profiler_enabled():
        return torch.profiler.record_function(f"simplegraph.replay {key}")
    return _NO_RANGE


def around_breaks(program: Program) -> contextlib.AbstractContextManager[Any]:
    """Around a replay: wrapped modules that its breaks call belong to it, and run eagerly."""
    return bypassed(Reason.NESTED) if program.breaks else _NO_RANGE


profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_NO_RANGE: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
