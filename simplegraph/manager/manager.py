"""`CudaGraphManager` captures, keeps and replays Programs by key, for engines that own their loop and buffers.

manager = CudaGraphManager(device="cuda", capture_sizes=[1, 2, 4, 8])
manager.capture(run_model)                      # run_model(mode, descriptor) reads the engine's buffers
...
batch = manager.dispatch(num_tokens=5)          # -> mode, padded descriptor, reason
fill_buffers(batch.descriptor)
hidden = manager.run(batch, run_model)          # replays, or runs eagerly without a graph
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

import torch
from torch import Tensor

from simplegraph.base import extras
from simplegraph.base.config import AttentionCGSupport, BatchDim, CudaGraphConfig, CudaGraphMode, LengthDim, PadRule
from simplegraph.base.errors import CaptureError, ConfigError, InputError, ReplayError, refuse_inside_capture
from simplegraph.base.extras import Sleeps
from simplegraph.base.reasons import Reason
from simplegraph.batch.dispatch import Dispatch, Dispatcher
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.device.select import graph_device
from simplegraph.distributed.ranks import Consensus, SingleRank, Vote
from simplegraph.manager.capture import GraphCapture
from simplegraph.manager.lifecycle import CapturedGraph
from simplegraph.manager.stats import CaptureSummary, GraphReport, GraphStats, register
from simplegraph.manager.table import CaptureJob, Forward, GraphHooks, Key, ProgramTable
from simplegraph.program.program import Program

if sys.version_info >= (3, 11):
    from typing import Unpack as Unpack
else:
    from typing_extensions import Unpack as Unpack

R = TypeVar("R")
ModeName = Literal["NONE", "OFF", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


class CudaGraphSettings(TypedDict, total=False):
    """Keyword arguments for the fields of `CudaGraphConfig`; see there."""

    mode: CudaGraphMode | ModeName
    capture_sizes: Sequence[int] | None
    max_num_seqs: int | None
    max_num_tokens: int | None
    uniform_query_len: int
    batch_dims: Mapping[str, BatchDim]
    pad_values: Mapping[str, PadRule]
    length_dims: Mapping[str, LengthDim]
    lengths: Sequence[int] | None
    padding: bool
    exact_shapes: bool
    outputs: Literal["clone", "static"]
    capture: Literal["lazy", "upfront"]
    num_warmups: int
    on_capture_failure: Literal["eager", "raise"]
    verify: int
    max_signatures: int
    on_too_many_signatures: Literal["eager", "flush"]
    state_key: Callable[[Any], Hashable] | None
    decode_capture_sizes: Sequence[int] | None
    training: bool
    debug: bool
    progress: bool


@dataclasses.dataclass(eq=False)
class RankHooks(GraphHooks):
    """Refuses a replay if its process group is gone or, with `debug`, if other ranks replay another graph."""

    ranks: SingleRank
    debug: bool

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self.ranks.check_alive()
        if self.debug:
            self.ranks.any(f"a {mode.name} replay of {descriptor}", True)


class CudaGraphManager(Sleeps):
    """Captures Programs, replays them by key, runs eagerly without a graph, and counts all calls.

    Args:
        config: the settings; fields can also be given as keywords.
        device: a torch device or a `GraphDevice`.
        pool: memory to share with other managers; their graphs must then never run at the same time.
        support: the support level of the attention inside the forward.
        lora_cases: the counts of active LoRAs to capture.
        requests: True if full graphs for mixed batches are keyed by their number of requests; see `Dispatcher`.
        name: its name in messages and in the report.
        ranks: the ranks whose graphs share collectives with these graphs, as a `RankGroup`; they capture together.
        consensus: lets ranks agree on the mode and size of every step in `dispatch`. Pass `ranks`, too, so that all
            ranks have the same graphs.
        stats: counters to continue; None for new ones.

    Attributes:
        kept_alive: tensors that engines' graphs read.

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
        ranks: SingleRank | None = None,
        consensus: Consensus | None = None,
        stats: GraphStats | None = None,
        **settings: Unpack[CudaGraphSettings],
    ) -> None:
        self.config = (config or CudaGraphConfig()).replace(**settings).from_env()
        self.device = graph_device(device)
        refuse_inside_capture(self.device.is_capturing())
        if pool is not None and pool.device is not self.device:
            raise ConfigError(f"the pool belongs to {pool.device.torch_device}, not to {self.device.torch_device}.")
        if not isinstance(support, AttentionCGSupport):
            raise ConfigError(f"support is {support!r}; expected an AttentionCGSupport, such as backend.support.")
        self.dispatcher = Dispatcher(self.config, support, lora_cases=lora_cases, requests=requests)
        if consensus is not None and not self.config.padding:
            raise ConfigError("padding is False, but ranks that agree on a size pad to the largest; allow padding.")
        self.consensus = consensus
        self.pool = pool or self.device.new_pool()
        if pool is None or pool.managers:  # a pool that no manager made may have other uses
            self.pool.managers.add(self)
        self.pool.shared = pool is not None
        self.ranks: SingleRank = ranks or SingleRank()
        self.support, self.stats = support, stats or GraphStats(name)
        self.table = ProgramTable(self.config, self.device, self.pool, self.ranks, support, self.stats)
        self.table.probes += extras.installed.probes(self.table.constants.probe_counts)
        self.hooks = self.table.hooks
        if ranks is not None:
            self.hooks.append(RankHooks(ranks, self.config.debug))
        self.kept_alive: list[Tensor] = []
        if stats is None:
            register(self)

    def __repr__(self) -> str:
        """Return the name and the counts of steps, for the list of `wrappers`."""
        return f"<{type(self).__name__} of {self.stats.name}: {self.stats.summary}>"

    @property
    def failures(self) -> dict[Key, CaptureError]:
        """The errors of sizes that could not be captured, or whose graph was dropped, by key."""
        return self.table.failures

    @property
    def programs(self) -> dict[Key, Program]:
        """The Programs that can be replayed, by key."""
        return {key: graph.program for key, graph in self.table.graphs.items()}

    def add_hooks(self, hooks: GraphHooks) -> None:
        """Call these hooks around every capture and replay from now on.

        Raises:
            ConfigError: graphs were captured without the hooks, or the manager is set up for more than they support.
        """
        if not isinstance(hooks, GraphHooks):
            raise ConfigError(f"hooks is {type(hooks).__name__}; expected a GraphHooks, such as an attention backend.")
        if self.table.graphs:
            raise ConfigError("graphs were captured without these hooks; add hooks before capture, or reset() first.")
        if hooks.support < self.support:
            raise ConfigError(
                f"{type(hooks).__name__} supports {hooks.support.name}, the manager was made for {self.support.name}; "
                "pass support=backend.support to CudaGraphManager."
            )
        most, asked = hooks.max_num_reqs, self.config.max_num_seqs
        if most is not None and self.dispatcher.mode.has_full() and (asked is None or asked > most):
            raise ConfigError(
                f"{type(hooks).__name__} takes {most} requests at most, the manager was made for max_num_seqs={asked}; "
                f"pass max_num_seqs={most} to CudaGraphManager, or build the backend for more."
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
        """Choose how to run a batch; see `Dispatcher.dispatch`.

        With a `consensus` all ranks run the step alike, eager steps included: each rank must call `dispatch` once for
        each step. A rank with nothing to run dispatches 0 tokens, and runs a batch of padding rows.

        Raises:
            RankError: the ranks did not agree.
            CaptureSizeError: the batch is empty; with a consensus, it is empty on every rank.
            InputError: the numbers do not fit each other.
        """
        asked = (num_tokens, num_reqs, uniform_query_len, num_active_loras)
        if self.consensus is None:
            return self.dispatcher.dispatch(*asked, allow_full=allow_full)
        dispatched = self.dispatcher.dispatch(*asked, allow_full=allow_full) if num_tokens else None
        agreed = self.consensus.agree(self._vote(dispatched))
        if dispatched is not None and agreed == self._vote(dispatched):
            if agreed.mode is dispatched.mode:
                return dispatched
            # There is no graph: run eagerly in the padded shape.
            return dispatched._replace(
                mode=CudaGraphMode.NONE, reason=self._why_uncaptured((dispatched.mode, dispatched.descriptor))
            )
        return self.dispatcher.agreed(*agreed, num_tokens=num_tokens)

    def _vote(self, dispatched: Dispatch | None) -> Vote:
        """Return this rank's proposal: NONE if it has no graph, since no rank may replay a graph that another lacks."""
        if dispatched is None:
            return Vote(CudaGraphMode.FULL, 0)
        captured = (dispatched.mode, dispatched.descriptor) in self.table.graphs
        mode = dispatched.mode if captured else CudaGraphMode.NONE
        return Vote(mode, dispatched.descriptor.num_tokens, dispatched.descriptor.num_active_loras)

    def _why_uncaptured(self, key: Key) -> Reason:
        return Reason.CAPTURE_FAILED if key in self.failures else Reason.NOT_CAPTURED_UPFRONT

    def _uncaptured(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        return [key for key in self.descriptors() if key not in self.table.graphs and key not in self.table.failures]

    def descriptors(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        """List all descriptors that `capture` captures, largest first."""
        return self.dispatcher.descriptors()

    def needs_capture(self) -> bool:
        """True if any descriptor has not been tried yet."""
        return bool(self._uncaptured())

    def capture(self, forward: Forward) -> CaptureSummary:
        """Capture every descriptor that has no graph yet, largest first, after a warmup of the largest.

        With `num_warmups` above 1, every descriptor is warmed up that many times. With 0 none is: warm up beforehand.

        Args:
            forward: called as ``forward(mode, descriptor)``; runs the model on the engine's own buffers,
                of ``descriptor.num_tokens`` rows, whose addresses must not change afterwards.

        Raises:
            CaptureError: a capture failed and ``on_capture_failure`` is "raise"; the others are captured. Or the
                stream is being captured already.
            InputError: the forward is a generator or a coroutine.
        """
        from simplegraph.manager.observation import engine_probes  # loaded only if needed

        jobs = [CaptureJob(key, *key, bind_forward(forward, *key)) for key in self._uncaptured()]
        capture = self.new_capture(jobs, probes=engine_probes(self.table, self.kept_alive, forward))
        summary = capture.inspect(capture.run(self.config.num_warmups))
        self.table.raise_failure(summary.failed)
        return summary

    def new_capture(self, jobs: Sequence[CaptureJob], **options: Any) -> GraphCapture:
        """Prepare to capture several graphs in one session; see `GraphCapture`."""
        refuse_inside_capture(bool(jobs) and self.device.is_capturing())
        settings = {name: value for hooks in self.hooks for name, value in hooks.settings.items()}
        return GraphCapture(self.table, jobs, {"lora_cases": self.dispatcher.lora_cases, **settings}, **options)

    def run(
        self,
        batch: Dispatch,
        forward: Callable[[CudaGraphMode, BatchDescriptor], R],
        *,
        verify: bool = False,
        state: Sequence[Tensor] = (),
    ) -> R:
        """Replay the batch's graph, or run `forward` eagerly if there is none.

        Args:
            batch: the result of `dispatch`.
            forward: as in `capture`.
            verify: True to run `forward` eagerly, replay the graph from the same start, and compare. The effects of the
                eager run stay.
            state: with `verify`, all tensors from before the forward that it writes.

        Returns:
            The outputs of the captured forward, padding rows included. They are graph memory, valid until the next
            replay of any graph in the pool. With `verify`, the outputs of the eager run.

        Raises:
            InputError: `batch` is no `Dispatch`. Or, with `verify`, the forward writes tensors that are not in `state`,
                or these are too large to copy.
            VerificationError: with `verify`, the replay differs, and ``on_capture_failure`` is "raise".
        """
        graph = self._graph_of(batch)
        capturing = self.device.is_capturing()
        if graph is not None and not capturing:
            if verify:
                from simplegraph.manager.replay_proof import prove_batch  # loaded only if needed

                job = CaptureJob(batch[:2], *batch[:2], bind_forward(forward, *batch[:2]))
                with self.pool.lock:
                    return prove_batch(  # type: ignore[no-any-return]
                        self.table, job, state, lambda: forward(CudaGraphMode.NONE, batch.descriptor)
                    )
            return self._replay(graph, batch.padding)  # type: ignore[no-any-return]
        reason, detail = batch.reason, ""
        if capturing:
            reason = Reason.BUSY
        elif batch.mode is not CudaGraphMode.NONE:
            reason = self._why_uncaptured((batch.mode, batch.descriptor))
            detail = "" if self.table.graphs else "call the manager's capture first"
        else:
            detail = self.dispatcher.advice(batch)
        self.stats.ran_eagerly(reason, detail, batch.descriptor.num_tokens - batch.padding)
        return forward(CudaGraphMode.NONE, batch.descriptor)

    def replay(self, batch: Dispatch) -> Any:
        """Replay the batch's graph.

        Raises:
            ReplayError: no graph was captured for the batch (`run` runs eagerly instead).
            InputError: `batch` is no `Dispatch`.
        """
        if (graph := self._graph_of(batch)) is None:
            where = f"{batch.descriptor} in mode {batch.mode.name}"
            raise ReplayError(f"no graph was captured for {where}; capture it, or use run().")
        return self._replay(graph, batch.padding)

    def _graph_of(self, batch: Dispatch) -> CapturedGraph | None:
        if not isinstance(batch, Dispatch):
            raise InputError(
                f"batch is {batch!r}; expected what dispatch() returned: manager.run(manager.dispatch(2), forward)."
            )
        return self.table.graphs.get((batch.mode, batch.descriptor))

    def _replay(self, graph: CapturedGraph, padding: int) -> Any:
        with self.pool.lock:
            self.table.order_streams()
            self.table.replay(graph, padding)
        return graph.program.result()

    def memory_estimate(self, forward: Forward) -> MemoryEstimate:
        """Measure the memory of all graphs: capture them into a temporary pool, and drop them again.

        The forward runs as in `capture`, and the effects of its warmups stay.

        Raises:
            CaptureError: a descriptor cannot be captured.
        """
        from simplegraph.manager.observation import engine_probes  # loaded only if needed

        quiet, stats = self.config.replace(progress=False), GraphStats(self.stats.name)
        trial = CudaGraphManager(quiet, device=self.device, stats=stats)
        trial.hooks.extend(self.hooks)
        try:
            jobs = [CaptureJob(key, *key, bind_forward(forward, *key)) for key in self.descriptors()]
            capture = trial.new_capture(jobs, probes=engine_probes(trial.table, trial.kept_alive, forward))
            summary = capture.run(self.config.num_warmups)
            for error in summary.failed.values():
                raise error  # without a graph there is no estimate
            taken = [graph.bytes for graph in trial.stats.graphs.values()]
            return MemoryEstimate.measured(self.device, taken, summary.bytes)
        finally:
            trial.reset()

    def report(self) -> GraphReport:
        """Report captures, replays and eager calls; print it, or call its `to_json`."""
        return GraphReport(self.stats, str(self.device.torch_device), emulated=self.device.emulated)

    def reset(self) -> None:
        """Drop all graphs and everything that they own, at once: graphs may share a cuBLAS workspace."""
        with self.pool.lock:
            self.table.clear()
            self.kept_alive.clear()
            self.table.release_pool()


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that all graphs take: the largest graph, and each further graph.

    Attributes:
        graphs: the number of graphs.
        first_bytes: device memory of the largest graph, and of everything that all graphs share.
        next_bytes: device memory that a further graph adds, on average.
        emulated: True if the graphs were emulated: then only their tensors count, without the driver's memory.
    """

    graphs: int
    first_bytes: int
    next_bytes: int
    emulated: bool = False

    @classmethod
    def measured(cls, device: GraphDevice, taken: Sequence[int], total: int) -> MemoryEstimate:
        """Make the estimate from the memory that a capture took, while its graphs are alive.

        Args:
            device: the device of the graphs.
            taken: bytes of each graph, the largest first.
            total: bytes of all graphs, including memory that libraries keep for a new stream.
        """
        free, further = device.free_memory(), sum(taken[1:])
        device.release_cached_memory()  # memory of warmups, which no graph needs
        first = max(total - (device.free_memory() - free), sum(taken)) - further
        return cls(len(taken), first, round(further / max(1, len(taken) - 1)), device.emulated)

    @property
    def bytes(self) -> int:
        return self.first_bytes + max(0, self.graphs - 1) * self.next_bytes

    def __str__(self) -> str:
        emulated = " (emulated: tensors only)" if self.emulated else ""
        return f"memory of {self.graphs} graph{'s' * (self.graphs != 1)}: about {self.bytes / 2**20:.1f} MiB{emulated}"


def bind_forward(forward: Forward, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Callable[[], Any]:
    """Bind an engine's forward to one descriptor; the result refuses generators and coroutines."""

    def run() -> Any:
        outputs = forward(mode, descriptor)
        if isinstance(outputs, (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)):
            raise InputError(
                f"the forward returned a {type(outputs).__name__}, whose body would run after the capture; "
                "return its values instead."
            )
        return outputs

    return run
