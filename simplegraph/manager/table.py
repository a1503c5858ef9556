"""The table of a model's Programs: jobs to capture, captured graphs, failures, and `replay`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simplegraph.base.config import AttentionCGSupport, CudaGraphConfig, CudaGraphMode
from simplegraph.base.constants import FrozenConstants
from simplegraph.base.context import bypassed
from simplegraph.base.errors import CaptureError, HostError
from simplegraph.base.failures import release_frames
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.device.protocol import GraphDevice, GraphPool, MemorySpan
from simplegraph.distributed.ranks import SingleRank
from simplegraph.manager.lifecycle import CapturedGraph, Event, SizeRecord
from simplegraph.manager.stats import (
    Described,
    GraphCounters,
    GraphStats,
    joined_labels,
    merged_failures,
    origin,
    where_failed,
)
from simplegraph.program.breaks.break_calls import BreakTrace, ReplayStopped
from simplegraph.program.lent_outputs import LentOutputs
from simplegraph.program.probes import Probe
from simplegraph.program.program import Program
from simplegraph.program.steady_reads import KnownTensors

if TYPE_CHECKING:
    from simplegraph.program.host_arguments import HostArguments

logger = logging.getLogger("simplegraph")
Forward = Callable[[CudaGraphMode, BatchDescriptor], Any]
Key = Hashable
OTHERS_TOO = "other sizes with the same cause will, too"  # for sizes that were not tried
_profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled


@dataclasses.dataclass(frozen=True)
class CaptureJob:
    """One graph to capture.

    Attributes:
        key: the key of the graph.
        mode, descriptor: the mode and the batch shape of the calls that it will serve.
        run: runs the forward on static inputs.
        generators: random generators that the forward draws from, beside the default one.
        inputs: the arguments that it is captured for, by name, as text for the report.
        values: the Python values that it is captured for; None if none count.
        exact: True if it has no batch dimension, so that labels name the inputs instead.
        name: returns the name of a tensor that the forward reads, for messages; None if it has none.
        tensors: distinguishes the module's tensors from data; None if no value of a tensor may be a constant.
        part: "forward" or "backward" of a training call; "" for a whole call.
        follows: the key of an earlier job whose graph is always replayed first, and whose memory this graph reads.
        host_error: the error of a run that showed that it cannot be captured; else None.
        arguments: the CPU tensors that the forward is passed, if the graph is for another device.
        record: the record of the size.
        trains: True for a training step or a part of a training call: its graph can contain no eager break.
    """

    key: Key
    mode: CudaGraphMode
    descriptor: BatchDescriptor
    run: Callable[[], Any]
    generators: tuple[torch.Generator, ...] = ()
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    name: Callable[[torch.Tensor], str | None] = lambda _: None
    tensors: KnownTensors | None = dataclasses.field(default=None, compare=False)
    exact: bool = False
    part: str = ""
    follows: Key | None = None
    host_error: HostError | None = None
    arguments: HostArguments | None = dataclasses.field(default=None, compare=False)
    record: SizeRecord = dataclasses.field(default_factory=SizeRecord, compare=False)
    trains: bool = False
    values: Described | None = dataclasses.field(default=None, compare=False)

    @property
    def padded(self) -> int:
        """The padded batch size."""
        return self.descriptor.num_tokens

    @functools.cached_property
    def label(self) -> str:
        kind = "" if self.mode is CudaGraphMode.FULL else f", {self.mode.name}"
        if self.exact:
            shown = {name: text for name, text in self.inputs.items() if name != "state"}
            return f"a call with {', '.join(map(' '.join, shown.items())) or 'no arguments'}{kind}"
        loras = f", {self.descriptor.num_active_loras} LoRAs" if self.descriptor.num_active_loras else ""
        uniform = ", uniform decode" if self.descriptor.uniform_query_len else ""
        part = f", {self.part}" if self.part else ""
        return f"batch size {self.descriptor.num_tokens}{uniform}{loras}{kind}{part}"

    @property
    def label_with_inputs(self) -> str:
        return f"{self.label} of {', '.join(map(' '.join, self.inputs.items()))}"


class GraphHooks:
    """Hooks around captures and replays, for another library. Override the methods you need.

    Attention backends plan in `before_replay`; an offloader joins its copy stream in `end_of_forward`.

    Attributes:
        support: the support level of its part of the forward.
        max_num_reqs: the most requests that its part of a step can have; None for any number. A manager of full graphs
            must be made for no more (`max_num_seqs`), so that none is captured for a batch that cannot occur.
    """

    support: AttentionCGSupport = AttentionCGSupport.ALWAYS
    max_num_reqs: int | None = None

    @property
    def settings(self) -> Mapping[str, object]:
        """Settings that must be the same on all ranks that capture together, by name."""
        return {}

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Set up the memory that this descriptor's graph will read; called directly before the capture."""

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Update the memory that the graph reads; called before every replay, outside the graph."""

    def undo_step(self) -> None:
        """Allow the last step to run once more: a proof has undone its writes, and will replay it."""

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        """Called after the forward, inside the capture: operators that run here are recorded."""


@dataclasses.dataclass(eq=False)
class ProgramTable:
    """Programs by key, and the state that their captures and replays share.

    Args:
        config: the settings.
        device: the device of the Programs.
        pool: the memory of the Programs.
        ranks: the ranks that capture together.
        support: the support level of the attention inside the forward.
        stats: counts captures and replays.

    Attributes:
        graphs: the graphs that can be replayed, by key.
        records: records of the sizes that were captured, or failed to be, by key.
        hooks: called around every capture and replay.
        constants: device tensors that warmups made from Python data, for captures.
        foreign: tensors that graphs touch though no operator was passed them; they are kept alive.
        accounted: the memory that observed runs of the last captures read, and that is kept alive.
        traces: traces of breaks from warmups, by key.
        unowned: addresses that graphs touch, and that are in no tensor's memory.
        lent: the static outputs that callers were handed last, which the next replay overwrites; None if none were.
        probes: probes of extras, for every run and capture.
    """

    config: CudaGraphConfig
    device: GraphDevice
    pool: GraphPool
    ranks: SingleRank
    support: AttentionCGSupport
    stats: GraphStats
    graphs: dict[Key, CapturedGraph] = dataclasses.field(default_factory=dict)
    records: dict[Key, SizeRecord] = dataclasses.field(default_factory=dict)
    hooks: list[GraphHooks] = dataclasses.field(default_factory=list)
    constants: FrozenConstants = dataclasses.field(default_factory=FrozenConstants)
    foreign: list[Tensor] = dataclasses.field(default_factory=list)
    accounted: list[MemorySpan] = dataclasses.field(default_factory=list)
    unowned: set[int] = dataclasses.field(default_factory=set)
    traces: dict[Key, BreakTrace] = dataclasses.field(default_factory=dict)
    probes: list[Probe] = dataclasses.field(default_factory=list)
    lent: LentOutputs | None = None
    _trace_of_any_size: BreakTrace | None = None
    _warned: set[str] = dataclasses.field(default_factory=set)  # origins of failures

    @property
    def failures(self) -> dict[Key, CaptureError]:
        """The errors of sizes that could not be captured, or whose graph was dropped, by key."""
        return {key: record.failure for key, record in self.records.items() if record.failure is not None}

    def replay(self, graph: CapturedGraph, padding: int = 0) -> None:
        """Replay a graph with this number of padding rows. Call it after `order_streams`, with the pool's lock held."""
        for hooks in self.hooks:
            hooks.before_replay(graph.mode, graph.descriptor)
        program = graph.program
        replay = program.replay
        if program.breaks or _profiler_enabled():
            with self._around(graph, padding):
                replay()
        else:  # an empty context would cost a microsecond
            replay()
        paddings = graph.counters.paddings
        try:
            paddings[padding] += 1
        except IndexError:  # it grows as needed: scrapes add up the lists of every graph
            paddings += [0] * (padding - len(paddings)) + [1]
        graph.replays_until_proof -= 1

    def discard_launch(self, graph: CapturedGraph, padding: int) -> None:
        """Note that the latest replay is discarded: it does not count."""
        graph.counters.paddings[padding] -= 1
        graph.replays_until_proof += 1
        self.stats.discarded_launches += 1

    @contextlib.contextmanager
    def _around(self, graph: CapturedGraph, padding: int) -> Any:
        """Set the profiler's range, and let wrapped modules that breaks call run eagerly, as parts of the replay."""
        with contextlib.ExitStack() as stack:
            if _profiler_enabled():  # under ``emit_nvtx`` an NVTX range, too
                label = f"simplegraph.replay {graph.counters.label}"
                stack.enter_context(torch.profiler.record_function(label))
            if graph.program.breaks:
                stack.enter_context(bypassed(Reason.NESTED))
                graph.program.pass_rows(graph.descriptor.num_tokens - padding if padding else 0)
            try:
                yield
            except ReplayStopped as error:
                error.graph, error.returned = graph, graph.program.take_returned()
                raise
            finally:
                graph.program.take_returned()

    def order_streams(self) -> None:
        """Let the current stream wait for the stream that used the pool last. Call it with the pool's lock held."""
        stream = self.device.current_stream()
        if stream != self.pool.stream:
            self.device.wait_for(self.pool.stream)
            self.pool.stream = stream

    # Captures.

    def add(self, job: CaptureJob, program: Program) -> None:
        """Add a new Program, and forget an earlier failure of its key."""
        nodes = [segment.num_nodes for segment in program.segments]
        total = None if None in nodes else sum(filter(None, nodes))
        kind = job.part.partition(",")[0].upper() or job.mode.name  # as the report names such graphs
        identity = job.label, kind, job.descriptor.num_tokens
        parts = len(nodes), len(program.breaks), total
        counters = GraphCounters(
            *identity, program.seconds, program.bytes, *parts, inputs=job.inputs, costs=program.costs, values=job.values
        )
        if job.key in self.records:
            self._forget_failure(job)
        compare = self.config.verify > 0
        job.record.note_captured(compare=compare)
        self.records[job.key] = job.record
        replays_until_proof = 0 if compare else -1
        self.graphs[job.key] = CapturedGraph(
            job.mode, job.descriptor, program, counters, job.record, replays_until_proof
        )
        self.stats.captures += 1
        self.stats.graphs[job.key] = counters

    def add_failures(self, failed: Mapping[CaptureJob, CaptureError], outcome: str) -> None:
        """Note failed jobs: batches of their sizes run eagerly from now on.

        Args:
            failed: the errors of the jobs.
            outcome: the outcome for other sizes, for the warning. Each cause is warned about once.
        """
        if not failed:
            return
        for job, error in failed.items():
            self._forget_failure(job)
            self.records[job.key] = job.record
            job.record.refuse(CannotBind(Reason.CAPTURE_FAILED, where_failed(error)), error)
            same_failure = self.stats.failures.get(job.label, str(error)) == str(error)
            self.stats.failures[job.label if same_failure else job.label_with_inputs] = str(error)
        messages = {job.label: str(error) for job, error in failed.items()}
        new = {label: message for label, message in messages.items() if origin(label, message) not in self._warned}
        self._warned |= {origin(*failure) for failure in new.items()}
        if self.config.on_capture_failure == "raise":
            return
        for error in failed.values():
            release_frames(error)
        for labels, message in merged_failures(new):
            run = f"{labels[0].upper()}{labels[1:]} now run{'s' if labels in new else ''} eagerly"
            said = self.stats.name, message, run, outcome, Reason.CAPTURE_FAILED.command
            logger.warning("simplegraph: %s: %s\n  %s; %s.\n  See: %s", *said)

    def _forget_failure(self, job: CaptureJob) -> None:
        record = self.records.get(job.key)
        if record is None or record.failure is None:
            return
        message = str(record.failure)
        record.retry()
        for label in (job.label, job.label_with_inputs):
            if self.stats.failures.get(label) == message:
                del self.stats.failures[label]

    def forget(self, jobs: Iterable[CaptureJob]) -> None:
        """Drop the programs of these jobs as if they had not been captured."""
        for key in [job.key for job in jobs if job.key in self.graphs]:
            self.stats.captures -= not self.graphs[key].counters.replays  # the totals of replays stay
            self.graphs.pop(key).drop(Event.DROPPED)
            self.stats.dropped([key])

    def refuse(self, jobs: Sequence[CaptureJob], cause: str, remedy: str) -> dict[str, CaptureError]:
        """Drop the programs of these jobs for a cause that was found after the capture; return the errors by label."""
        self.forget(jobs)
        text = "the graph of {} is dropped\n  {}.\n  {}"
        failed = {job.label: CaptureError(text.format(job.label, cause, remedy), cause=cause) for job in jobs}
        outcome = "no other size was captured" if len(jobs) > 1 else OTHERS_TOO
        self.add_failures({job: failed[job.label] for job in jobs}, outcome)
        return failed

    def raise_failure(self, failed: dict[str, CaptureError]) -> None:
        """Raise the first of several failures if ``on_capture_failure`` is "raise"."""
        if failed and self.config.on_capture_failure == "raise":
            raise next(iter(failed.values()))

    def add_trace(self, key: Key, trace: BreakTrace) -> None:
        """Keep a warmup's trace of a graph's breaks."""
        self.traces[key] = trace
        if trace.any_size:
            self._trace_of_any_size = trace

    def trace(self, key: Key) -> BreakTrace | None:
        """Return the trace of a key, or else a trace that is valid for every batch size; None if there is neither."""
        return self.traces.get(key) or self._trace_of_any_size

    def release_pool(self) -> None:
        """Release the pool's memory if no graph is left in it, and if only managers use it."""
        with self.pool.lock:
            if (managers := self.pool.managers) and not any(manager.table.graphs for manager in managers):
                # In place: managers that share the pool go on with it.
                self.device.release_pool(self.pool)
                self.pool.handle = self.device.new_pool().handle

    @contextlib.contextmanager
    def releasing_unused_pool(self) -> Iterator[None]:
        """Release the pool after the block if it holds no graph then."""
        try:
            yield
        finally:
            if not self.graphs:
                self.release_pool()

    def clear(self) -> None:
        """Drop all Programs, at once, since they may share a cuBLAS workspace; and all other state."""
        if self.graphs:
            self.device.synchronize()  # a graph still running must not lose its memory
        for graph in self.graphs.values():
            graph.drop(Event.MOVED)
        for record in self.records.values():
            record.note_dropped(Event.MOVED)
        self.stats.dropped(self.graphs)
        self.graphs.clear()
        self.records.clear()
        self.traces.clear()
        self._trace_of_any_size = None
        self.constants.clear()
        self.foreign.clear()
        self.accounted.clear()
        self.lent = None


def on_all_ranks(
    table: ProgramTable, action: str, jobs: Sequence[CaptureJob], errors: Mapping[str, CaptureError]
) -> dict[str, CaptureError]:
    """Return the errors of all ranks by label, and drop graphs that failed on another rank: no rank may replay them."""
    all_errors = dict(errors)
    others = table.ranks.failures(f"{action} {joined_labels([job.label for job in jobs])}", errors) if jobs else {}
    for job in jobs:
        if job.label in others and job.label not in errors:
            table.forget([job])
            rank, words = others[job.label]
            cause = f"it failed on rank {rank}, and its collectives need all ranks"
            said = words.replace("\n", "\n  ")
            message = f"{action} {job.label} failed on rank {rank}\n  {cause}:\n  {said}"
            all_errors[job.label] = CaptureError(message, cause=cause)
    return all_errors
