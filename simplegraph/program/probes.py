"""The events of captures, and the probes that observe them.

A probe adds knowledge that captures themselves do not have: of Python state, values on the host, memory that a forward
reads and writes, the driver's view of a graph, or a library. Each event reaches the probes of a list in this order:

    before_captures     after the runs whose effects stay; from the first to the last
    before_capture      before each recording; from the first to the last
    around              around each run, eager or recorded; the first probe is the outermost
    after_recording     after each recording; from the last to the first
    inspect             when the captures can no longer be undone; from the last to the first
    undo                when something is undone; from the last to the first, each probe even if another raises
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from simplegraph.device.protocol import GraphDevice, GraphPool


@dataclasses.dataclass(eq=False)
class Run:
    """One run of a forward.

    Attributes:
        key: the key of the graph, or of several graphs, of which it is a warmup or the recording; None for other runs.
        job: the `CaptureJob` of this graph; None for other runs.
        label: its name in messages.
        rows: the batch size; 0 if it is not known.
        recorded: True if its operators are recorded instead of executed.
        as_recorded: True if it takes the branches that a recording takes: it is a recording, or is compared with one.
        rehearsed: True if all its effects are undone.
        observed: True if each of its operators is observed.
        before_write: called with a tensor before an operator of an observed run writes to memory from before the run.
        made: returns True for a tensor in memory that the observed run made.
        owned: returns the tensors that probes own because this run, or a run before it, read them.
        left_addresses: addresses of tensors that a failed recording made and something else owned.
        outputs: the result of an eager run; trace: its `BreakTrace`, if it has breaks.
    """

    key: Hashable | None = None
    job: Any = None
    label: str = ""
    rows: int = 0
    recorded: bool = False
    as_recorded: bool = False
    rehearsed: bool = False
    observed: bool = True
    before_write: Callable[[Tensor], object] = lambda _: None
    made: Callable[[Tensor], bool] = lambda _: False
    owned: Callable[[], Iterable[Tensor]] = tuple
    left_addresses: set[int] = dataclasses.field(default_factory=set)
    outputs: Any = None
    trace: Any = None


@dataclasses.dataclass(eq=False)
class RecordedRun:
    """Describes a recording before its first replay.

    Attributes:
        run: the run that was recorded.
        device, pool: its device and memory pool.
        program: the resulting `Program`.
        held: everything that the program holds, and the program before it if it reads its memory.
        searched: True if tensors that it left behind are to be searched for. False if a recording follows that owns
            some of them.
    """

    run: Run
    device: GraphDevice
    pool: GraphPool
    program: Any
    held: Sequence[Any]
    searched: bool


class Undone(enum.Enum):
    """The part of a capture that is undone, from the smallest to the largest."""

    RUN = "done flags of runs whose work was undone"
    RECORDING = "a recording that failed"
    RECORDINGS = "all recordings, before one is tried a second time"
    SECOND_TRY = "a warmup and a recording that came to nothing"


class Probe:
    """Observes captures. Override the events you need; by default each does nothing.

    Attributes:
        refuses: True if recordings did something that no graph may do, so that second tries are undone as well.
        sets_flags: True if recordings, or another thread meanwhile, set done flags in Python objects.
        distrusts: True if unobserved recordings may differ from observed ones; then all recordings are observed.
    """

    refuses: bool = False
    sets_flags: bool = False
    distrusts: bool = False

    def before_captures(self, *, again: bool = False) -> None:
        """Remember what captures may change; `again` before a second try that goes on from its own warmup."""

    def before_capture(self, run: Run) -> None:
        """Refuse a recording before it begins, by raising a CaptureError."""

    def around(self, run: Run) -> contextlib.AbstractContextManager[object]:
        """Surround a run, to see its operators; refuse it by raising an error."""
        return contextlib.nullcontext()

    def after_recording(self, recorded: RecordedRun) -> None:
        """Inspect a recording; refuse it by raising a CaptureError."""

    def set_twice(self) -> list[str]:
        """Name the done flags that recordings set in two passes of captures, so that no other thread set them."""
        return []

    def inspect(self, capture: Any, summary: Any) -> Any:
        """Inspect the graphs of a `GraphCapture`, and release saved state; return the summary of the graphs kept."""
        return summary

    def undo(self, stage: Undone, runs: Sequence[Run]) -> None:
        """Undo the changes of these runs."""


@contextlib.contextmanager
def around(probes: Sequence[Probe], run: Run) -> Iterator[None]:
    """Enter the contexts of all probes around a run."""
    with contextlib.ExitStack() as stack:
        for probe in probes:
            stack.enter_context(probe.around(run))
        yield


def undo(probes: Sequence[Probe], stage: Undone, runs: Sequence[Run] = ()) -> None:
    """Let all probes undo a stage, from the last to the first, each even if another raises."""
    with contextlib.ExitStack() as stack:
        for probe in probes:
            stack.callback(probe.undo, stage, runs)
