"""Captures inside calls: the first of a kind of calls is observed, others if they may read other memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.manager import capture
from simplegraph.program.observe import MemoryObserver
from simplegraph.serve.replay_or_eager import GraphRunner
from tests.module.answers import close

pytestmark = pytest.mark.usefixtures("no_grad")
WIDTH = 6
SIZES = [8, 4, 2]


class Tables(nn.Module):
    """Adds a row of its own to small batches; `keep` says where it is kept from the first such call on."""

    def __init__(self, keep: Callable[[Tables, int], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tables: dict[int, Tensor] = {}
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + self.keep(self, len(x)) if len(x) < 4 else y


KEPT: dict[int, Tensor] = {}  # by no module, so that no guard knows of it


def filled(module: Tables, rows: int) -> Tensor:
    """Return the table for so many rows, made at the first call."""
    if rows not in KEPT:
        KEPT[rows] = torch.full((WIDTH,), float(rows), device=module.linear.weight.device)
    return KEPT[rows]


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes whose captures are observed."""
    found: list[int] = []

    class Noted(MemoryObserver):
        def __enter__(self) -> MemoryObserver:
            found.extend([self.numbers.rows] if self.captures else [])
            return super().__enter__()

    monkeypatch.setattr(capture, "MemoryObserver", Noted)
    return found


def served(module: nn.Module, device: torch.device, sizes: list[int] = SIZES) -> Any:
    """Wrap a module, and call it at each size until a graph answers."""
    model = sg.wrap(module.eval(), capture_sizes=sizes, progress=False)
    call_each(model, device, sizes)
    return model


def call_each(model: Any, device: torch.device, sizes: list[int] = SIZES) -> None:
    """Call a model at each size: a warmup, its capture, replays."""
    for rows in sizes:
        for _ in range(4):
            x = torch.randn(rows, WIDTH, device=device)
            answer = model(x)
            with sg.eager():
                close(answer, model(x))


def test_one_capture_of_a_kind_of_calls_is_observed(device: torch.device, observed: list[int]) -> None:
    model = served(nn.Linear(WIDTH, WIDTH).to(device), device)
    assert observed == [8]
    assert len(model.graph_stats.graphs) == 3
    model.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))  # all graphs are dropped
    call_each(model, device)
    assert observed == [8, 8]


def test_a_size_that_fills_a_cache_is_observed_and_owns_its_table(device: torch.device, observed: list[int]) -> None:
    """Its first run makes the table, and its capture reads it: memory that a graph reads must stay."""
    KEPT.clear()
    model = served(Tables(filled).to(device), device)
    assert observed == [8, 2]
    table = KEPT.pop(2)
    assert any(tensor is table for tensor in model._graph_runner.builder.seen.read.elsewhere.values())


def test_a_size_that_reads_other_memory_is_observed(device: torch.device, observed: list[int]) -> None:
    module = Tables(lambda self, rows: self.tables[rows]).to(device)
    module.tables = {2: torch.full((WIDTH,), 2.0, device=device)}
    model = served(module, device)
    assert observed == [8, 2]
    module.tables[2] = torch.full((WIDTH,), 100.0, device=device)
    call_each(model, device, [2])


def test_no_garbage_is_collected_on_the_way_to_a_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole collection takes longer than a capture, and used to come in the middle of one call or another."""
    collects, serve = [], GraphRunner._serve

    def noted(*args: Any) -> Any:
        collects.append(gc.isenabled())
        return serve(*args)

    monkeypatch.setattr(GraphRunner, "_serve", noted)
    model: Any = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=SIZES, progress=False)
    for _ in range(3):
        model(torch.randn(8, WIDTH, device=device))
        assert gc.isenabled()
    assert model.graph_stats.replays
    assert collects == [False, False]
