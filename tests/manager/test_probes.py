"""Probes look on at captures: which events reach them, in what order, and in what order they undo."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import CudaGraphManager
from simplegraph.base.errors import CaptureError
from simplegraph.manager.observation import engine_probes
from simplegraph.manager.table import CaptureJob
from simplegraph.program.probes import Probe, RecordedRun, Run, Undone, undo

pytestmark = pytest.mark.usefixtures("nothing_left_behind", "no_grad")

WIDTH = 3


class Noting(Probe):
    """Notes each event, by the probe's name."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def note(self, event: str) -> None:
        self.events.append(f"{self.name} {event}")

    def before_captures(self, *, again: bool = False) -> None:
        self.note("before captures")

    def before_capture(self, run: Run) -> None:
        self.note(f"before the capture of {run.rows}")

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        kind = "recording" if run.recorded else "rehearsal" if run.rehearsed else "run"
        self.note(f"enters a {kind} of {run.rows}")
        try:
            yield
        finally:
            self.note(f"leaves a {kind} of {run.rows}")

    def after_recording(self, recorded: RecordedRun) -> None:
        self.note(f"after the recording of {recorded.run.rows}")

    def inspect(self, capture: Any, summary: Any) -> Any:
        self.note("inspects")
        return summary

    def undo(self, what: Undone, runs: Sequence[Run]) -> None:
        said = " ".join(
            f"a {'recording' if run.recorded else 'rehearsal' if run.rehearsed else 'run'} of {run.rows}"
            for run in runs
        )
        self.note(f"undoes {what.name}{f' of {said}' if said else ''}")


def captured(
    device: torch.device,
    sizes: Sequence[int],
    probes: Sequence[Probe],
    forward: Callable[[Tensor], Tensor] = lambda x: x + 1,
) -> tuple[CudaGraphManager, dict[str, CaptureError]]:
    """Capture these sizes, warming up the largest; return the manager, and what failed."""
    manager = CudaGraphManager(device=device, capture_sizes=list(sizes), progress=False)
    x = torch.zeros(max(sizes), WIDTH, device=device)
    jobs = [CaptureJob(key, *key, lambda rows=key[1].num_tokens: forward(x[:rows])) for key in manager.descriptors()]
    own = engine_probes(manager.table, manager.kept_alive, forward)
    capture = manager.new_capture(jobs, probes=[*own, *probes])
    summary = capture.inspect(capture.run(1))
    return manager, summary.failed


def test_events_come_in_the_order_of_the_list_and_what_ends_comes_from_its_end(device: torch.device) -> None:
    events: list[str] = []
    manager, failed = captured(device, [2], [Noting("outer", events), Noting("inner", events)])
    assert failed == {}
    assert events == [
        "outer enters a run of 2",
        "inner enters a run of 2",
        "inner leaves a run of 2",
        "outer leaves a run of 2",
        "outer before captures",
        "inner before captures",
        "inner undoes RUN",
        "outer undoes RUN",
        "outer before the capture of 2",
        "inner before the capture of 2",
        "outer enters a recording of 2",
        "inner enters a recording of 2",
        "inner leaves a recording of 2",
        "outer leaves a recording of 2",
        "inner after the recording of 2",
        "outer after the recording of 2",
        "inner undoes RUN",
        "outer undoes RUN",
        "inner inspects",
        "outer inspects",
    ]
    manager.reset()


def undone(events: Sequence[str]) -> list[str]:
    return [event for event in events if " undoes " in event]


def test_what_a_failed_capture_and_its_second_try_did_is_undone_from_the_smallest_to_the_largest(
    device: torch.device,
) -> None:
    """The last probe first: each finds what the ones before it in the list left, as with contexts."""
    events: list[str] = []

    def forward(x: Tensor) -> Tensor:
        if events and "enters a recording" in events[-1]:
            raise ValueError("no graph")
        return x + 1

    manager, failed = captured(device, [2], [Noting("outer", events), Noting("inner", events)], forward)
    assert list(failed) == ["batch size 2"]
    assert undone(events) == [
        "inner undoes RUN",
        "outer undoes RUN",
        "inner undoes RECORDING of a recording of 2",
        "outer undoes RECORDING of a recording of 2",
        "inner undoes RECORDINGS",
        "outer undoes RECORDINGS",
        "inner undoes RECORDING of a recording of 2",
        "outer undoes RECORDING of a recording of 2",
        "inner undoes SECOND_TRY of a rehearsal of 2 a recording of 2",
        "outer undoes SECOND_TRY of a rehearsal of 2 a recording of 2",
        "inner undoes RUN",
        "outer undoes RUN",
    ]
    manager.reset()


def test_a_probe_refuses_one_size_before_its_recording_and_others_are_captured(device: torch.device) -> None:
    class Refuses(Probe):
        def before_capture(self, run: Run) -> None:
            if run.rows == 4:
                raise CaptureError("capturing batch size 4 failed\n  not this one.", cause="not this one")

    manager, failed = captured(device, [2, 4], [Refuses()])
    assert {label: error.cause for label, error in failed.items()} == {"batch size 4": "not this one"}
    assert [kind.num_tokens for _, kind in manager.programs] == [2]
    manager.reset()


def test_a_probe_refuses_what_was_recorded_and_nothing_of_it_is_left(device: torch.device) -> None:
    class Refuses(Probe):
        def after_recording(self, recorded: RecordedRun) -> None:
            raise CaptureError("capturing failed\n  not this graph.", cause="not this graph")

    manager, failed = captured(device, [2], [Refuses()])
    assert failed["batch size 2"].cause == "not this graph"
    assert manager.programs == {}
    assert not manager.device.left_alive(manager.pool)
    manager.reset()


def test_a_probe_that_distrusts_others_has_every_size_observed(device: torch.device) -> None:
    """Sizes between the largest and the smallest are taken to read what these do."""
    observed: list[tuple[int, bool]] = []

    class Distrusts(Probe):
        distrusts = True

        def around(self, run: Run) -> contextlib.AbstractContextManager[object]:
            if run.recorded:
                observed.append((run.rows, run.observed))
            return contextlib.nullcontext()

    manager, failed = captured(device, [1, 2, 4, 8], [Distrusts()])
    assert failed == {}
    assert {rows for rows, each in observed if each} >= {1, 2, 4}
    assert [rows for rows, each in observed if each and rows in (2, 4)] == [4, 2]
    manager.reset()


def test_an_engine_whose_forward_keeps_a_tensor_is_refused_without_asking_for_probes(device: torch.device) -> None:
    """`import simplegraph` registers the probes of engines; an engine that knew none would replay into kept memory."""
    kept: list[Tensor] = []
    manager = CudaGraphManager(device=device, capture_sizes=[2], progress=False)
    x = torch.zeros(2, WIDTH, device=device)

    def forward(mode: Any, descriptor: Any) -> Tensor:
        kept.append(x + 1)
        return kept[-1] * 2

    failed = manager.capture(forward).failed
    assert "kept in the closure" in str(failed["batch size 2"])
    manager.reset()


def test_a_capture_that_is_not_inspected_keeps_nothing_alive(device: torch.device) -> None:
    """Probes of a table live as long as it; what one capture's runs read must not."""
    manager = CudaGraphManager(device=device, capture_sizes=[2], progress=False)
    x = torch.zeros(2, WIDTH, device=device)
    jobs = [CaptureJob(key, *key, lambda x=x: x + 1) for key in manager.descriptors()]
    probes = engine_probes(manager.table, [], jobs[0].run)
    capture = manager.new_capture(jobs, probes=probes)
    assert capture.run(1).captured == 1
    read = weakref.ref(x)
    del capture, probes, jobs, x
    manager.reset()
    assert read() is None


def test_a_probe_that_cannot_undo_keeps_no_other_from_undoing() -> None:
    events: list[str] = []

    class Breaks(Probe):
        def undo(self, what: Undone, runs: Sequence[Run]) -> None:
            raise ValueError(f"cannot undo {what.name}")

    with pytest.raises(ValueError, match="cannot undo RUN"):
        undo([Noting("outer", events), Breaks(), Noting("inner", events)], Undone.RUN)
    assert events == ["inner undoes RUN", "outer undoes RUN"]
