"""Observe eager runs and recordings operator by operator: the memory that they use, and their constants."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.constants import WatchedVersion, note_graph_writes
from simplegraph.base.failures import capture_error
from simplegraph.base.modes import autocast_cache
from simplegraph.base.tensors import wait_collectives
from simplegraph.manager.stats import CaptureSummary
from simplegraph.manager.table import CaptureJob, Forward, Key, ProgramTable
from simplegraph.program.breaks.break_calls import BreakTrace
from simplegraph.program.breaks.marks import breaking_operators, recording_breaks
from simplegraph.program.escapes import PythonState
from simplegraph.program.host_arguments import HostArguments
from simplegraph.program.host_modes import HostCapture, HostWarmup
from simplegraph.program.observe import MemoryObserver, observed_tensors
from simplegraph.program.probes import Probe, RecordedRun, Run, around
from simplegraph.program.steady_reads import KnownTensors, SteadyReads


def run_observed(
    table: ProgramTable,
    run: Callable[[], Any],
    key: Key | None = None,
    *,
    traced: bool = False,
    rows: int = 0,
    inputs: Collection[int] = (),
    arguments: HostArguments | None = None,
    before_write: Callable[[Tensor], object] = lambda _: None,
    tensors: KnownTensors | None = None,
) -> tuple[Any, MemoryObserver, BreakTrace | None]:
    """Run a forward eagerly, and observe the memory that it reads and writes.

    Args:
        table: the table of the graphs; it gets the constants of a warmup.
        run: the forward.
        key: the key of the graph, or of several graphs, of which the run is a warmup; None if it is no warmup.
        traced: True to trace its breaks, too.
        rows: its batch size, if known.
        inputs: storage keys of its tensors.
        arguments: the CPU tensors that it is passed, if it runs on another device.
        before_write: see `MemoryObserver`.
        tensors: distinguishes the module's tensors from data; None if every value that is read back is data.
    """
    about = Run(key=key, rows=rows, before_write=before_write)
    watching = _observe_eager_run(table, about, traced=traced, inputs=inputs, arguments=arguments, tensors=tensors)
    with around(table.probes, about), watching as observer:
        outputs = about.outputs = wait_collectives(run())
    return outputs, observer, about.trace


@contextlib.contextmanager
def _observe_eager_run(
    table: ProgramTable,
    run: Run,
    *,
    traced: bool,
    inputs: Collection[int] = (),
    arguments: HostArguments | None = None,
    tensors: KnownTensors | None = None,
) -> Iterator[MemoryObserver]:
    """Observe an eager run, and keep the constants of a warmup; see `run_observed`."""
    observer = MemoryObserver(rows=run.rows, before_write=run.before_write)
    tracer = None
    if traced:
        from simplegraph.program.breaks.eager import BreakTracer  # not loaded for full graphs

        tracer = BreakTracer(breaking_operators(), observer, table.device.torch_device, inputs)
    device = table.device.torch_device
    host = HostWarmup(device, arguments, None if tensors is None else SteadyReads(device, tensors))
    following = contextlib.nullcontext() if run.key is None else host.following(observer)
    # Under grad mode the caller's cache stays on: all uses of a weight's cast then add to one gradient.
    casts = contextlib.nullcontext() if torch.is_grad_enabled() else autocast_cache(enabled=False)
    # The observer sees operators first: those of the forward, not those that replace them.
    try:
        with casts, recording_breaks(tracer), following, observer:
            yield observer
    finally:
        # The caller's function may lead to this observer: a circle would keep external memory alive.
        observer.before_write = lambda _: None
    if run.key is not None:
        answers = host.steady.collect_answers() if host.steady is not None else {}
        table.constants.learn(run.key, host.copies, host.sources, met_host=host.met_host, answers=answers)
    if tracer is not None:
        run.trace = tracer.finish(run.outputs)


@dataclasses.dataclass(eq=False)
class Observation(Probe):
    """Observes the runs and recordings of one capture.

    Observing takes time: if the largest and the smallest size read the same memory, the others are not observed.

    Args:
        table: the table of the graphs.

    Attributes:
        observers: the observers of runs and recordings, in order.
        reads: CPU tensors from before the runs whose values are constants in the graphs, by their place in memory.
        versions: versions of the tensors from which warmups read values for recordings.
        distrusts: True if two sizes read different memory, or if one did something that a capture must not do.
    """

    table: ProgramTable
    observers: list[MemoryObserver] = dataclasses.field(default_factory=list)
    reads: dict[tuple[Any, ...], Tensor] = dataclasses.field(default_factory=dict)
    versions: list[WatchedVersion] = dataclasses.field(default_factory=list)
    _host: HostCapture | None = None  # of the recording under way
    _answered: bool = False  # a recording took a value from a warmup

    def before_capture(self, run: Run) -> None:
        """Refuse a forward if an earlier run did something that a capture must not do."""
        for error in filter(None, (run.job.host_error, *(observer.host_error for observer in self.observers))):
            raise capture_error(error, run.label, trains=run.job.trains)
        run.owned = functools.partial(observed_tensors, self.observers)

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Observe the operators of a run; a recording uses the constants that an eager run moved to the device."""
        job: CaptureJob = run.job
        if run.recorded:
            with self._observe_recording(run, job):
                yield
            return
        traced = job.mode is CudaGraphMode.PIECEWISE
        with _observe_eager_run(
            self.table, run, traced=traced, arguments=job.arguments, tensors=job.tensors
        ) as observer:
            yield
        run.made = observer.made
        self.observers.append(observer)

    @contextlib.contextmanager
    def _observe_recording(self, run: Run, job: CaptureJob) -> Iterator[None]:
        constants, device = self.table.constants, self.table.device
        copies, answers = constants.copies(job.key), constants.answers(job.key)
        steady = SteadyReads(device.torch_device, job.tensors, answers) if job.tensors and answers else None
        host = self._host = HostCapture(device.torch_device, copies, job.name, job.arguments, steady)
        observer = MemoryObserver(device, job.padded, self.observers[-1] if job.follows else None)
        run.made = observer.made
        followed = run.observed or constants.met_host or job.arguments or self._answered
        try:
            with (
                host.following(observer if run.observed else None) if followed else contextlib.nullcontext(),
                observer if run.observed else contextlib.nullcontext(),
            ):
                yield
        finally:
            if observer.host_error:  # other sizes would do the same
                self.observers.append(observer)
                self.distrusts = True
        host.check_refused()
        self.observers += [observer] if run.observed else []
        written = observer.written | observer.launched
        note_graph_writes(tensor for key, tensor in observer.external.items() if key in written)
        recorded = [observer for observer in self.observers if observer.captures]
        # A warmup shows what the first size reads if its recording was not observed.
        seen = recorded if len(recorded) > 1 else [*self.observers[:1], *recorded]
        self.distrusts = any(
            observer.host_error or observer.external.keys() != seen[0].external.keys() for observer in seen
        )

    def after_recording(self, recorded: RecordedRun) -> None:
        """Let the program own the constants that it reads."""
        if self._host is not None:
            recorded.program.constants = list(self._host.served.values())
            recorded.program.indices = self.observers[-1].indices if recorded.run.observed else None
            self.reads |= self._host.reads
            if self._host.steady is not None:
                self.versions += self._host.steady.used
                self._answered = self._answered or self._host.steady.answered


@dataclasses.dataclass(eq=False)
class _EngineObservation(Observation):
    """Observes the captures of an engine's forward, and keeps alive what the graphs read, in `kept_alive`."""

    kept_alive: list[Tensor] = dataclasses.field(kw_only=True)

    def inspect(self, capture: Any, summary: CaptureSummary) -> CaptureSummary:
        """Keep alive the tensors that the graphs read."""
        read = (tensor for observer in self.observers for tensor in observer.external.values())
        self.kept_alive += [tensor.detach() for tensor in read]
        return summary


def engine_probes(table: ProgramTable, kept_alive: list[Tensor], forward: Forward) -> list[Probe]:
    """Make the probes of an engine's captures: one observes operators, the other restores Python state."""
    return [_EngineObservation(table, kept_alive=kept_alive), PythonState([forward])]
