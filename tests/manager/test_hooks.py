"""Hooks run outside and inside the graph."""

from __future__ import annotations

import pytest
import torch

from simplegraph import (
    AttentionCGSupport,
    BatchDescriptor,
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    GraphHooks,
    Reason,
)
from tests.manager.engines import WIDTH, Engine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Notes(GraphHooks):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[tuple[str, int, bool]] = []
        self.scale = torch.ones((), device=engine.device)
        self.joined = torch.zeros((), device=engine.device)

    def _note(self, name: str, descriptor: BatchDescriptor) -> None:
        self.seen.append((name, descriptor.num_tokens, self.engine.manager.device.is_capturing()))

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._note("before_capture", descriptor)

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._note("before_replay", descriptor)
        self.engine.x.mul_(2)  # as attention plans what the graph then reads

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._note("end_of_forward", descriptor)
        self.joined.add_(1)


def test_hooks_run_outside_and_inside_the_graph_as_they_should(device: torch.device) -> None:
    engine = Engine(device, capture_sizes=[2, 4])
    notes = Notes(engine)
    engine.manager.add_hooks(notes)
    engine.manager.capture(engine.forward)
    assert notes.seen == [
        ("before_capture", 4, False),
        ("end_of_forward", 4, True),
        ("before_capture", 2, False),
        ("end_of_forward", 2, True),
    ]
    assert notes.joined.item() == 0, "capturing executes nothing"
    notes.seen.clear()
    engine.x.fill_(1)
    output = engine.manager.replay(engine.manager.dispatch(3))
    torch.testing.assert_close(output, engine.model(torch.full((4, WIDTH), 2.0, device=device)) * 2)
    assert notes.seen == [("before_replay", 4, False)]
    assert notes.joined.item() == 1, "what a hook did at the end of the forward is in the graph"


class Failing(GraphHooks):
    def __init__(self, where: str, size: int) -> None:
        self.where, self.size = where, size

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._fail("before_capture", descriptor)

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._fail("end_of_forward", descriptor)

    def _fail(self, where: str, descriptor: BatchDescriptor) -> None:
        if (where, descriptor.num_tokens) == (self.where, self.size):
            raise LookupError(f"{where} of {self.size}")


@pytest.mark.parametrize("where", ["before_capture", "end_of_forward"])
def test_a_hook_that_fails_at_a_capture_costs_that_size_only(engine: Engine, where: str) -> None:
    engine.manager.add_hooks(Failing(where, 4))
    summary = engine.manager.capture(engine.forward)
    assert summary.captured == 3
    assert f"LookupError: {where} of 4" in str(summary.failed["batch size 4"])
    for count in (8, 3, 2, 1):
        engine.step(count)
    assert engine.manager.stats.replays == 3
    assert engine.manager.stats.eager == {Reason.CAPTURE_FAILED: 1}


def test_hooks_that_come_too_late_or_can_do_less_than_the_manager_was_made_for_are_refused(engine: Engine) -> None:
    class Weak(GraphHooks):
        support = AttentionCGSupport.NEVER

    with pytest.raises(ConfigError, match="Weak supports NEVER, the manager was made for ALWAYS"):
        engine.manager.add_hooks(Weak())
    with pytest.raises(ConfigError, match="hooks is str"):
        engine.manager.add_hooks("x")  # type: ignore[arg-type]
    engine.manager.capture(engine.forward)
    with pytest.raises(ConfigError, match="add hooks before capture"):
        engine.manager.add_hooks(GraphHooks())
    assert engine.manager.hooks == []


def test_support_by_name_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="support is 'ALWAYS'"):
        CudaGraphManager(device=device, support="ALWAYS")  # type: ignore[arg-type]
