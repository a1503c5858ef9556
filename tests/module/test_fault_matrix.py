"""Errors and interrupts at every step of a call: a clear error or a reason, and the next call is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from eager_twin import Raised
from quiet import quiet
from run_log import unwatched
from torch import Tensor

import simplegraph as sg
from simplegraph.call.inputs import InputSet
from simplegraph.call.outputs import OutputShapes
from simplegraph.call.plan import Plan
from simplegraph.device.saved_state import SavedMemory
from simplegraph.device.select import graph_device
from simplegraph.guard.guards import CapturedState
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.replay_proof import ReplayProof
from simplegraph.manager.table import ProgramTable
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.program import Program, SegmentRecorder
from simplegraph.program.session import CaptureSession
from simplegraph.program.snapshot import Snapshot
from tests.module.faults import SIZE, WIDTH, Bomb, Breaks, Fault, Hooks, Keeps, Subject, Trial, planted

ERRORS: dict[str, Callable[[], BaseException]] = {
    "an error": lambda: Fault("made by a test"),
    "an interrupt": KeyboardInterrupt,
}


@pytest.fixture(params=[0, 1], ids=["unproven", "proven"], autouse=True)
def _proven(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without proofs, and with them: the first replay of a graph then runs eagerly too."""
    monkeypatch.setenv("SIMPLEGRAPH_VERIFY", str(request.param))


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    with quiet():
        yield


def capturing(x: Tensor) -> bool:
    return graph_device(x.device).is_capturing()


def finish(trial: Trial, results: list[Any]) -> None:
    """Check everything that must be true at the end of a trial."""
    bomb, stats = trial.bomb, trial.model.graph_stats
    assert bomb.fired, "the fault was never reached"
    raised = [result for result in results if isinstance(result, Raised)]
    assert len(raised) <= 1
    if isinstance(bomb.error, KeyboardInterrupt):
        assert [result.error for result in raised] == [bomb.error], "an interrupt reaches the user"
    assert not any(isinstance(result, Raised) for result in results[-3:])
    assert stats.replays or stats.eager.keys() - {sg.Reason.FIRST_CALL, sg.Reason.WARMUP}, "eager without a reason"
    if not raised:
        assert stats.failures, "a fault that the user did not see is in the report"
    trial.model.reset_graphs()
    with torch.no_grad():
        for _ in range(3):
            assert not isinstance(trial.call(), Raised)


# The user's own code, by when it raises.

MOMENTS: dict[str, tuple[int, Callable[[Any], bool]]] = {
    "the first call": (0, lambda x: not capturing(x)),
    "the capture": (1, capturing),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("place", ["begin", "middle", "end"])
@pytest.mark.parametrize("kind", [Subject, Keeps])
def test_the_forward_raises_in_a_capture(device: torch.device, kind: type[Subject], place: str, error: str) -> None:
    trial = Trial(kind, device, Bomb(ERRORS[error]()), lambda x, here: here == place and capturing(x))
    finish(trial, trial.run(1))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("moment", ["the first call", "a call without graphs"])
def test_the_forward_raises_at_its_begin_in_eager_runs(device: torch.device, moment: str, error: str) -> None:
    trial = Trial(
        Subject,
        device,
        Bomb(ERRORS[error]()),
        lambda x, here: here == "begin" and not capturing(x),
        {"mode": "NONE"} if moment == "a call without graphs" else {},
    )
    results = trial.run({"the first call": 0, "a call without graphs": 2}[moment])
    assert sum(isinstance(result, Raised) and result.error is trial.bomb.error for result in results) == 1
    finish(trial, results)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("moment", ["warmup", "capture of breaks", "first replay", "replay"])
def test_a_break_raises(device: torch.device, moment: str, error: str) -> None:
    trial = Trial(Breaks, device, Bomb(ERRORS[error]()), lambda x, here: here == "break", {"mode": "PIECEWISE"})
    results = trial.run({"warmup": 0, "capture of breaks": 1, "first replay": 2, "replay": 3}[moment])
    assert trial.bomb.fired
    assert [result.error for result in results if isinstance(result, Raised)] == [trial.bomb.error]
    finish(trial, results)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["child's hook", "child's pre-hook", "the module's hook", "the module's pre-hook"])
def test_a_forward_hook_raises_in_a_capture(device: torch.device, where: str, error: str) -> None:
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    target = trial.model.first if where.startswith("child") else trial.model
    held = unwatched(bomb=trial.bomb)  # a hook reads what it leads to

    def hook(module: Any, args: Any, *result: Any) -> None:
        if capturing(args[0]):
            held().bomb()

    target.register_forward_pre_hook(hook) if where.endswith("pre-hook") else target.register_forward_hook(hook)
    finish(trial, trial.run(1))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["before_capture", "end_of_forward", "before_replay"])
def test_a_managers_hook_raises(device: torch.device, where: str, error: str) -> None:
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    with torch.no_grad():
        trial.call()
    manager: CudaGraphManager = trial.model.graph_manager
    manager.table.hooks.append(Hooks(trial.bomb, where))
    finish(trial, trial.run(0 if where != "before_replay" else 2))


@pytest.mark.parametrize("error", ERRORS)
def test_a_state_key_raises(device: torch.device, error: str) -> None:
    bomb = Bomb(ERRORS[error]())
    trial = Trial(Subject, device, bomb, settings={"state_key": lambda model: bomb()})
    results = trial.run(3)
    assert [result.error for result in results if isinstance(result, Raised)] == [bomb.error]
    finish(trial, results)


# The library's own steps, by what is interrupted and whether before or after it.

CAPTURE_STEPS: dict[str, tuple[Any, str]] = {
    "the session's begin": (CaptureSession, "__enter__"),
    "the snapshot": (Snapshot, "__init__"),
    "the recorder's begin": (SegmentRecorder, "begin"),
    "the recorder's end": (SegmentRecorder, "finish"),
    "the observer's begin": (MemoryObserver, "__enter__"),
    "the program": (Program, "__init__"),
    "the table": (ProgramTable, "add"),
    "the changes": (Snapshot, "changes"),
    "the outputs": (OutputShapes, "learn"),
    "the state": (CapturedState, "__init__"),
    "the plan": (Plan, "__init__"),
    "the inputs": (InputSet, "load"),
}
DEVICE_STEPS = ["begin", "end", "on_capture_stream", "wait_for", "free_memory", "borrow", "in_pool"]
PROOF_STEPS: dict[str, tuple[Any, str]] = {
    "the eager run": (ReplayProof, "run_eager"),
    "its replay": (ReplayProof, "replay"),
    "its comparison": (ReplayProof, "difference"),
    "its end": (ReplayProof, "__exit__"),
    "the copy of memory": (SavedMemory, "copy"),
    "putting memory back": (SavedMemory, "put"),
}
REPLAY_STEPS: dict[str, tuple[Any, str]] = {
    "the copies": (Plan, "load"),
    "the replay": (ProgramTable, "replay"),
    "what is written back": (Plan, "write_back"),
    "the call": (Plan, "replay"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", CAPTURE_STEPS)
def test_a_step_of_a_capture_fails(
    device: torch.device, step: str, late: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    planted(monkeypatch, *CAPTURE_STEPS[step], trial.bomb, late=late)
    finish(trial, trial.run(1))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", DEVICE_STEPS)
def test_a_step_of_the_device_fails(
    device: torch.device, step: str, late: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    planted(monkeypatch, type(trial.graphs), step, trial.bomb, late=late)
    finish(trial, trial.run(1))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", REPLAY_STEPS)
def test_a_step_of_a_replay_fails(
    device: torch.device, step: str, late: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    planted(monkeypatch, *REPLAY_STEPS[step], trial.bomb, late=late)
    finish(trial, trial.run(4))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", PROOF_STEPS)
def test_a_step_of_a_proof_fails(
    device: torch.device, step: str, late: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_VERIFY", "1")
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    planted(monkeypatch, *PROOF_STEPS[step], trial.bomb, late=late)
    finish(trial, trial.run(1))


@pytest.mark.parametrize("error", ERRORS)
def test_putting_back_is_interrupted_after_it_is_done(
    device: torch.device, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(Keeps, device, Bomb(ERRORS[error]()))
    planted(monkeypatch, Snapshot, "put_back", trial.bomb, late=True)
    finish(trial, trial.run(1))


UPFRONT: dict[str, tuple[Any, str]] = {
    "the session's begin": (CaptureSession, "__enter__"),
    "a capture": (CaptureSession, "capture"),
    "the table": (ProgramTable, "add"),
    "the state": (CapturedState, "__init__"),
    "the inputs": (InputSet, "load"),
}
WARMED_UP = {"a capture", "the table", "the state"}  # after the warmup, a real run that the module counts


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", UPFRONT)
def test_a_step_of_capturing_all_sizes_fails(
    device: torch.device, step: str, late: bool, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(Subject, device, Bomb(ERRORS[error]()))
    with torch.no_grad():
        trial.call()  # fills what is filled once
    planted(monkeypatch, *UPFRONT[step], trial.bomb, late=late)
    trial.bomb.armed = True
    before = trial.state(trial.model)
    x, y = torch.randn(SIZE, WIDTH, device=device), torch.zeros(SIZE, WIDTH, device=device)
    with pytest.raises(type(trial.bomb.error)) as caught:
        trial.model.capture_graphs(x, y)
    assert caught.value is trial.bomb.error
    trial.check_around()
    for count in (before["count"], trial.eager.count):
        count += step in WARMED_UP
    trial.same(trial.state(trial.model), before, "the state")
    with torch.no_grad():
        for _ in range(5):
            assert not isinstance(trial.call(), Raised)
    assert trial.model.graph_stats.replays


def test_the_matrix_is_large() -> None:
    library = len(CAPTURE_STEPS) + len(DEVICE_STEPS) + len(PROOF_STEPS) + len(REPLAY_STEPS) + len(UPFRONT)
    users = len(list(itertools.product(range(2), range(3)))) + 3 + 4 + 4 + 3 + 1
    assert len(ERRORS) * (2 * library + users) >= 60
