"""What is to be captured, what came of it, and what a run was seen to read."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.config import CudaGraphMode
from simplegraph.errors import CaptureError, InputError
from simplegraph.graph.breaks.operators import breaking_operators
from simplegraph.graph.breaks.recorder import BreakTrace
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.program import Program
from simplegraph.manager.stats import GraphCounters

Forward = Callable[[CudaGraphMode, BatchDescriptor], Any]
Key = Hashable


@dataclasses.dataclass(frozen=True)
class CaptureJob:
    """One graph to capture.

    Attributes:
        key: what it will be replayed by.
        mode, descriptor: what it serves.
        run: the forward, on static inputs.
        generators: random generators the forward draws from, beside the default one.
    """

    key: Key
    mode: CudaGraphMode
    descriptor: BatchDescriptor
    run: Callable[[], Any]
    generators: tuple[torch.Generator, ...] = ()

    @property
    def label(self) -> str:
        kind = "" if self.mode is CudaGraphMode.FULL else f", {self.mode.name}"
        loras = f", {self.descriptor.num_active_loras} LoRAs" if self.descriptor.num_active_loras else ""
        uniform = ", uniform decode" if self.descriptor.uniform_query_len else ""
        return f"batch size {self.descriptor.num_tokens}{uniform}{loras}{kind}"


@dataclasses.dataclass(frozen=True)
class CaptureSummary:
    """What a capture of several sizes did.

    Attributes:
        captured: how many graphs were captured.
        failed: label -> error of those that were not.
        seconds: wall time, warmup included.
        bytes: device memory taken, as the device's free memory saw it.
    """

    captured: int
    failed: dict[str, CaptureError]
    seconds: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """What capturing everything would take: the largest graph, and what each further one adds.

    Attributes:
        graphs: how many there would be.
        first_bytes: device memory of the largest graph; next_bytes: what the next one added to it.
    """

    graphs: int
    first_bytes: int
    next_bytes: int

    @property
    def bytes(self) -> int:
        return self.first_bytes + max(0, self.graphs - 1) * self.next_bytes


def keep_alive(observers: Iterable[MemoryObserver]) -> list[Any]:
    """References that keep alive what observed runs read."""
    return [tensor.detach() for observer in observers for tensor in observer.external.values()]


def bind_forward(forward: Forward, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Callable[[], Any]:
    """An engine's forward for one descriptor, refusing what a capture cannot hold."""

    def run() -> Any:
        outputs = forward(mode, descriptor)
        if isinstance(outputs, (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)):
            raise InputError(
                f"the forward returned a {type(outputs).__name__}, whose body would run after the capture; "
                "return its values instead."
            )
        return outputs

    return run


class TraceTable:
    """What warmups learnt of the eager breaks of piecewise graphs, by the graph's key.

    Args:
        device: where the forwards run.
        names: operators that break, beside the tagged ones.
    """

    def __init__(self, device: torch.device, names: Sequence[str]) -> None:
        self._device = device
        self._names = names
        self._by_key: dict[Key, BreakTrace] = {}
        self._any_size: BreakTrace | None = None

    def begin(self, observer: MemoryObserver) -> BreakTrace:
        """A trace for a run that `observer` sees."""
        return BreakTrace(breaking_operators(self._names), observer, self._device)

    def add(self, key: Key, trace: BreakTrace, outputs: Any) -> None:
        """Keep the trace of a warmup that returned these outputs."""
        trace.finish(outputs)
        self._by_key[key] = trace
        if trace.any_size:
            self._any_size = trace

    def find(self, key: Key) -> BreakTrace | None:
        """The key's own trace, or one whose breaks return the same for every batch size."""
        return self._by_key.get(key) or self._any_size

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def clear(self) -> None:
        """Forget them all."""
        self._by_key.clear()
        self._any_size = None


def observing(run: Callable[[], Any], observers: list[MemoryObserver]) -> Callable[[], Any]:
    """The run, which notes what it reads."""

    def observed() -> Any:
        observer = MemoryObserver()
        with observer:
            outputs = run()
        observers.append(observer)
        return outputs

    return observed


def read_differently(observers: Sequence[MemoryObserver]) -> bool:
    """Whether the sizes looked at were seen to read different memory, so that any other may as well."""
    return len(observers) > 1 and observers[0].external.keys() != observers[-1].external.keys()


def counters(job: CaptureJob, program: Program) -> GraphCounters:
    """What the stats keep of a new program."""
    nodes = [segment.num_nodes for segment in program.segments]
    return GraphCounters(
        job.label,
        job.mode.name,
        job.descriptor.num_tokens,
        program.seconds,
        program.bytes,
        len(nodes),
        len(program.breaks),
        sum(count for count in nodes if count is not None) if all(count is not None for count in nodes) else None,
        costs=program.costs,
    )
