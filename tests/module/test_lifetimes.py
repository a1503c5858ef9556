"""Lifetime of a call's memory: static outputs outlive their graphs, static inputs do not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.program.observe import MemoryObserver
from tests.module.answers import close
from tests.module.functions import WIDTH, graphed, rows
from tests.support.reserved import reserved

pytestmark = pytest.mark.usefixtures("no_grad")


def overwrite_free_memory(device: torch.device) -> None:
    """Let memory that nothing uses go back to the device, after filling what of it can be had again."""
    gc.collect()
    gc.collect()  # of the emulator's memory: the collector does not look into storages, which hold some
    for _ in range(3):
        kept = [torch.full((size, WIDTH), float("nan"), device=device) for size in (1, 2, 4, 8, 64) for _ in range(20)]
        del kept
    if device.type == "cuda":
        torch.cuda.empty_cache()


def static_output(device: torch.device) -> tuple[Any, Tensor]:
    model = graphed(device, lambda m, x: torch.tanh(x @ m.weight), outputs="static")
    for _ in range(4):
        output = model(rows(4, device))
    assert model.graph_stats.replays >= 1
    return model, output


WAYS_TO_DROP: dict[str, Callable[[Any], object]] = {
    "reset_graphs": lambda model: model.reset_graphs(),
    "configure_graphs": lambda model: model.configure_graphs(capture_sizes=[2]),
    "another pool": lambda model: model.use_graph_pool(sg.graph_pool(model.weight.device)),
    "a weight replaced, and a call": lambda model: (
        setattr(model, "weight", nn.Parameter(model.weight + 1)),
        model(torch.ones_like(model.weight)),
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_DROP)
def test_a_static_output_stays_readable_when_its_graph_is_dropped(device: torch.device, way: str) -> None:
    model, output = static_output(device)
    row, expected = output[1:3, 2:], output.clone()
    WAYS_TO_DROP[way](model)
    overwrite_free_memory(device)
    assert torch.equal(output, expected)
    del output
    overwrite_free_memory(device)
    assert torch.equal(row, expected[1:3, 2:])


def test_a_static_output_outlives_its_wrapper(device: torch.device) -> None:
    model, output = static_output(device)
    expected = output.clone()
    del model
    overwrite_free_memory(device)
    assert torch.equal(output, expected)


def test_memory_of_a_static_output_is_given_back_with_its_last_view(device: torch.device) -> None:
    graphs = sg.graph_pool(device).device

    def last_view() -> Tensor:
        model = graphed(device, lambda m, x: x * m.weight.sum(), outputs="static")
        for _ in range(4):
            output = model(rows(4, device))
        return output.t()[2:]

    last_view()  # what the process keeps from its first graphs on
    overwrite_free_memory(device)
    before = reserved(graphs)
    view = last_view()
    overwrite_free_memory(device)
    assert torch.isfinite(view).all()
    assert reserved(graphs) > before
    del view
    overwrite_free_memory(device)
    assert reserved(graphs) == before


def test_a_static_output_may_be_the_input_of_the_call_that_drops_the_graphs(device: torch.device) -> None:
    model = graphed(device, lambda m, x: torch.tanh(x @ m.weight), outputs="static")
    for _ in range(5):
        for _ in range(4):
            output = model(rows(4, device))
        expected = output.clone()
        model.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        overwrite_free_memory(device)
        close(model(output), torch.tanh(expected @ model.weight))
    assert model.graph_stats.recaptures == 5


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * x.sum().item(),
        lambda m, x: (x * 2, object()),
        lambda m, x: (x * 2, torch.ones(len(x) + 1, len(x))),
    ],
)
@pytest.mark.parametrize("padding", [False, True])
def test_an_eager_call_keeps_no_argument_alive(device: torch.device, function: Any, padding: bool) -> None:
    model = graphed(device, function, padding=padding)
    passed = []
    for size in (4, 8, 3, 4, 3, 3, 4, 8):
        x = rows(size, device)
        passed.append(weakref.ref(x))
        model(x)
        del x
    gc.collect()
    assert [ref() for ref in passed] == [None] * 8


def test_captures_leave_no_observer_behind(device: torch.device) -> None:
    """An observer holds the external memory of its run: one in a circle would count as a holder of that memory."""
    gc.collect()
    gc.disable()
    try:
        before = sum(type(thing) is MemoryObserver for thing in gc.get_objects())
        model = graphed(device, lambda m, x: torch.tanh(x @ m.weight), num_warmups=3)
        model.capture_graphs(rows(4, device))
        for _ in range(4):
            model(rows(4, device))
        assert model.graph_stats.replays
        assert sum(type(thing) is MemoryObserver for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_the_memory_of_a_wrapper_that_is_gone_waits_for_no_garbage_collection(device: torch.device) -> None:
    gc.collect()
    gc.disable()
    try:
        model = graphed(device, lambda m, x: torch.tanh(x @ m.weight))
        for _ in range(4):
            model(rows(4, device))
        assert model.graph_stats.replays
        pool = weakref.ref(model.graph_manager.pool)
        del model
        assert pool() is None
    finally:
        gc.enable()
