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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from simplegraph.batch.descriptor import BatchDescriptor, Dispatch
from simplegraph.batch.dispatch import Dispatcher
from simplegraph.batch.reasons import Reason
from simplegraph.config import AttentionCGSupport, CudaGraphConfig, CudaGraphMode
from simplegraph.context import bypassed
from simplegraph.distributed import Consensus, RankGroup, ShapeConsensus, SingleRank, Vote
from simplegraph.errors import CaptureError, ConfigError, ReplayError
from simplegraph.graph.device import GraphDevice, GraphPool
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.program import Program
from simplegraph.graph.select import graph_device
from simplegraph.manager.capture import JobCapture
from simplegraph.manager.jobs import (
    CaptureJob,
    CaptureSummary,
    Forward,
    Key,
    MemoryEstimate,
    TraceTable,
    bind_forward,
    keep_alive,
)
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats

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
        self.ranks: RankGroup | SingleRank = ranks or SingleRank()
        if consensus is not None and not self.config.padding:
            raise ConfigError("padding is False, but ranks that agree on a size pad to the largest; allow padding.")
        alone = isinstance(consensus, ShapeConsensus) and consensus.size == 1
        self.consensus = None if alone else consensus
        self.stats = GraphStats(name)
        self.programs: dict[Key, Program] = {}
        self.failures: dict[Key, CaptureError] = {}
        self.traces = TraceTable(self.device.torch_device, self.config.break_ops)
        self.hooks: list[GraphHooks] = [] if ranks is None else [_ReplayedByAll(ranks, debug=self.config.debug)]
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
            CaptureJob((mode, descriptor), mode, descriptor, bind_forward(forward, mode, descriptor))
            for mode, descriptor in self.descriptors()
            if (mode, descriptor) not in self.programs and (mode, descriptor) not in self.failures
        ]
        observers: list[MemoryObserver] = []
        summary = self.capture_jobs(jobs, num_warmups=self.config.num_warmups, observers=observers)
        self._owned.setdefault("engine", []).extend(keep_alive(observers))
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
            jobs = [CaptureJob(key, *key, bind_forward(forward, *key)) for key in todo[:2]]
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
        return JobCapture(self, jobs, [] if observers is None else observers, lazy=lazy).run(num_warmups)

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
            self.note_failure(job, failed[job.label])
        return dataclasses.replace(summary, captured=0, failed=failed)

    def note_failure(self, job: CaptureJob, error: CaptureError) -> None:
        """Let a job be one that failed: batches of its size run eagerly from now on."""
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
