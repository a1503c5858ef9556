"""The calls that lead to a graph: when Python runs in them, when garbage waits, and what happens where one raises."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from unfollowed import unfollowed

import simplegraph as sg
from simplegraph.base.collection import without_collections
from simplegraph.program.snapshot import Snapshot
from tests.module.answers import close, reasons

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
WIDTH = 6


class Runs:
    """Notes at each run of the layer if garbage is collected meanwhile; raises at the one that it is told."""

    def __init__(self) -> None:
        self.collects: list[bool] = []
        self.raises = 0

    def linear(self, *args: Tensor) -> Tensor:
        self.collects.append(gc.isenabled())
        if len(self.collects) == self.raises:
            raise ArithmeticError("told to")
        return torch.addmm(args[2], args[0], args[1].t())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """What torch's layers call is seen there, by a weak reference: what notes its own runs would have no graph."""
    found = Runs()
    monkeypatch.setattr(nn.functional, "linear", unfollowed(found.linear))
    return found


def served(device: torch.device, **settings: Any) -> Any:
    layer = nn.Linear(WIDTH, WIDTH, device=device).eval()
    return sg.wrap(layer, **{"capture_sizes": [4], "progress": False} | settings)


def called(model: Any, device: torch.device, rows: int = 4) -> None:
    x = torch.randn(rows, WIDTH, device=device)
    close(model(x), torch.addmm(model.bias, x, model.weight.t()))


def _call_until_it_raises(model: Any, device: torch.device) -> None:
    for _ in range(4):
        called(model, device)


def test_python_runs_once_a_call_and_once_more_where_it_is_recorded(runs: Runs, device: torch.device) -> None:
    model = served(device)
    ran = []
    for _ in range(5):
        runs.collects.clear()
        called(model, device)
        ran.append(len(runs.collects))
    assert ran == [1, 2, 0, 0, 0]


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("upfront", [True, False])
def test_garbage_waits_for_captures_and_in_no_run_of_the_users(
    upfront: bool, collects: bool, runs: Runs, device: torch.device
) -> None:
    model = served(device)
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        if upfront:
            model.capture_graphs(torch.randn(4, WIDTH, device=device))
        for _ in range(5):
            called(model, device)
            assert gc.isenabled() == collects
        *earlier, recorded, proven = runs.collects
        assert (set(earlier), recorded, proven) == ({collects and not upfront}, False, collects)
    finally:
        (gc.enable if before else gc.disable)()


def test_nothing_is_collected_while_what_a_module_holds_is_remembered(device: torch.device) -> None:
    """It makes enough objects to start a collection of everything, of 70 ms and more, every few times."""
    model, collected = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300))), []
    thresholds = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: collected.append(phase))
    try:
        gc.set_threshold(10, 2, 2)
        collected.clear()
        before = Snapshot(model)
        assert len(collected) < 20  # of hundreds, before it and after
        assert not before.changes()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()


def test_pauses_in_several_threads_end_with_the_last() -> None:
    assert gc.isenabled()
    first, second = without_collections(), without_collections()
    with first:
        second.__enter__()
    assert not gc.isenabled()
    with without_collections():
        pass
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_forward_that_raises_at_any_step_is_served_later(run: int, runs: Runs, device: torch.device) -> None:
    """Runs are those of a first call, of a capture, and of the proof in the same call."""
    model = served(device, on_capture_failure="raise")
    runs.raises = run
    with pytest.raises((ArithmeticError, sg.CaptureError), match="told to"):
        _call_until_it_raises(model, device)
    assert gc.isenabled()
    assert len(runs.collects) == run
    for _ in range(5):
        called(model, device)
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("shadow", [[1, 2], None, property(lambda self: 1 / 0)], ids=["list", "none", "property"])
def test_a_module_may_have_another_thing_called_parameters(shadow: Any, device: torch.device) -> None:
    class Shadowing(nn.Linear):
        parameters = shadow

    model = sg.wrap(Shadowing(WIDTH, WIDTH, device=device).eval(), capture_sizes=[4], progress=False)
    for _ in range(3):
        called(model, device)
    assert model.graph_stats.replays == 1


def test_wrappers_inside_take_no_step_of_their_own(device: torch.device) -> None:
    inner = sg.wrap(nn.Linear(WIDTH, WIDTH, device=device), capture_sizes=[4], progress=False)
    inner.eval()
    model = sg.wrap(nn.Sequential(inner, nn.ReLU()).eval(), capture_sizes=[4], progress=False)
    for _ in range(5):
        x = torch.randn(4, WIDTH, device=device)
        close(model(x), torch.addmm(inner.bias, x, inner.weight.t()).relu())
    assert model.graph_stats.replays == 3
    assert inner.graph_stats.captures == 0
    assert set(reasons(inner)) == {"nested"}


@pytest.mark.parametrize(
    ("dtype", "autocast", "expected"),
    [
        (torch.float16, None, torch.float16),
        (torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float64, None, torch.bfloat16),
        (torch.float16, "buffer", torch.float16),
    ],
)
def test_libraries_load_for_the_dtype_of_the_modules_products(
    dtype: torch.dtype, autocast: Any, expected: torch.dtype, device: torch.device
) -> None:
    layers = nn.Sequential(nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)).to(device, dtype).eval()
    if autocast == "buffer":
        layers.register_buffer("scale", torch.ones(1, device=device))
        autocast = None
    model = sg.wrap(layers, capture_sizes=[4], progress=False)
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        model(torch.zeros(4, dtype=torch.long, device=device))
    assert model.graph_manager.device.dtype is expected
