"""The events of captures, and the probes that look on at them.

A probe adds what the engine of graphs does not know: Python's state, values on the host, what a forward reads and
writes, what the driver tells of a graph, a library's ways. Events reach a list of probes in this order:

    before_captures     the runs that stay are over; in the list's order
    before_capture      of each recording, before it begins; in the list's order
    around              a run, eager or recorded; the list's first is the outermost
    after_recording     from the last to the first: what came last is let go of first
    inspect             when nothing can be undone any more; from the last to the first
    undo                from the last to the first, so that each finds what those before it left; all of them, even if
                        one raises
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
        key: of the graph that it is a warmup or the recording of, or what tells several; None if it is neither.
        job: what that graph is captured from, as its maker describes it; None for other runs.
        label: what is run, for messages.
        rows: the batch size; 0 if it is not known.
        recorded: its operators are recorded; otherwise they run.
        as_recorded: it goes the way of a recording: it is one, or is compared with one.
        rehearsed: nothing of it stays.
        observed: each of its operators is looked at.
        before_write: called with a tensor before an operator writes to memory from before the run, if that is observed.
        made: returns True for a tensor in memory that the run made, if it was observed.
        owned: returns the tensors that probes own because this run, or one before it, read them.
        left_addresses: addresses of tensors that a failed recording had made and something owned.
        outputs: what an eager run returned; trace: its `BreakTrace`, if it has breaks.
    """

    key: Hashable | None = None
    job: Any = None
    label: str = ""
    rows: int = 0
    recorded: bool = False
    as_recorded: bool = False
    rehearsed: bool = False
    observed: bool = True
    before_write: Callable[[Tensor], object] = id
    made: Callable[[Tensor], bool] = lambda _: False
    owned: Callable[[], Iterable[Tensor]] = tuple
    left_addresses: set[int] = dataclasses.field(default_factory=set)
    outputs: Any = None
    trace: Any = None


@dataclasses.dataclass(eq=False)
class RecordedRun:
    """Describes what a run was recorded as, before anything replays it.

    Attributes:
        run: what was recorded.
        device, pool: where, and into what memory.
        program: the `Program` that came of it.
        held: what the program holds, and the one before it whose memory it reads.
        searched: tensors that it left behind are to be looked for: another recording that follows would own some.
    """

    run: Run
    device: GraphDevice
    pool: GraphPool
    program: Any
    held: Sequence[Any]
    searched: bool


class Undone(enum.Enum):
    """Says what is undone, from the smallest to the largest."""

    RUN = "done flags of runs, of whose work no later call sees the effect"
    RECORDING = "a recording that failed"
    RECORDINGS = "all recordings, before one is tried a second time"
    SECOND_TRY = "a warmup and a recording that came to nothing"


class Probe:
    """Looks on at captures. Override what is needed; each event does nothing.

    Attributes:
        refuses: True if recordings did what no graph may do, so that second tries are undone as well.
        sets_flags: True if recordings set flags in Python's objects that say that work is done, or another thread did.
        distrusts: True if recordings that were not observed may do other than those that were: all are then observed.
    """

    refuses: bool = False
    sets_flags: bool = False
    distrusts: bool = False

    def before_captures(self, *, again: bool = False) -> None:
        """Remember what captures may change; `again` before a second try that goes on from its own warmup."""

    def before_capture(self, run: Run) -> None:
        """Refuse a recording before it begins, by raising a CaptureError."""

    def around(self, run: Run) -> contextlib.AbstractContextManager[object]:
        """Surround a run; see its operators, and refuse what no graph holds by raising."""
        return contextlib.nullcontext()

    def after_recording(self, recorded: RecordedRun) -> None:
        """Look at what a run was recorded as; refuse it by raising a CaptureError."""

    def set_twice(self) -> list[str]:
        """Name the done flags that recordings set in two passes of captures: the forward does, and no other thread."""
        return []

    def inspect(self, capture: Any, summary: Any) -> Any:
        """Look at the graphs of a `GraphCapture`, and let go of what undoing needed; return the summary of the rest."""
        return summary

    def undo(self, stage: Undone, runs: Sequence[Run]) -> None:
        """Put back what these runs changed."""


@contextlib.contextmanager
def around(probes: Sequence[Probe], run: Run) -> Iterator[None]:
    """Enter what all probes surround a run by."""
    with contextlib.ExitStack() as stack:
        for probe in probes:
            stack.enter_context(probe.around(run))
        yield


def undo(probes: Sequence[Probe], stage: Undone, runs: Sequence[Run] = ()) -> None:
    """Let all probes undo a stage, from the last to the first, each even if another raises."""
    with contextlib.ExitStack() as stack:
        for probe in probes:
            stack.callback(probe.undo, stage, runs)
