"""Nothing grows with traffic: what is remembered of calls is bounded, and dropped memory goes back at once."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close
from tests.module.functions import graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def objects_kept(call: Callable[[int], object], turns: range) -> int:
    """Count the objects that calls leave behind."""
    gc.collect()
    before = len(gc.get_objects())
    for turn in turns:
        call(turn)
    gc.collect()
    return len(gc.get_objects()) - before


class Summed(nn.Module):
    """Has a name for each of its arguments."""

    def forward(self, x: Tensor, a: int, b: int, c: int, d: int, e: int, f: int) -> Tensor:
        return x * (a + b + c + d + e + f)


def test_keywords_in_every_order_leave_nothing_behind(device: torch.device) -> None:
    model: Any = sg.wrap(Summed().eval(), capture_sizes=[4, 8], progress=False)
    orders = [*itertools.permutations("abcdef")]

    def call(turn: int) -> None:
        x = rows(4, device)
        close(model(x, **dict.fromkeys(orders[turn], 1)), x * 6)

    objects_kept(call, range(100))
    assert objects_kept(call, range(100, 200)) < 100
    assert model.graph_stats.replays > 150
    assert model.graph_stats.captures == 1


def test_orders_that_a_forward_sees_leave_nothing_behind(device: torch.device) -> None:
    settings = {"on_too_many_signatures": "eager", "max_signatures": 2}
    model = graphed(device, lambda m, x, **more: x * sum(n * 10**at for at, n in enumerate(more.values())), **settings)
    orders = [*itertools.permutations(range(1, 7))]

    def call(turn: int) -> None:
        x = rows(4, device)
        order = orders[turn]
        more = {f"n{number}": number for number in order}
        close(model(x, **more), x * sum(number * 10**at for at, number in enumerate(order)))

    objects_kept(call, range(100))
    assert objects_kept(call, range(100, 200)) < 400
    assert model.graph_stats.captures <= 2


def test_keywords_of_every_name_leave_nothing_behind(device: torch.device) -> None:
    model = graphed(device, lambda m, x, **more: x * 2, on_too_many_signatures="eager", max_signatures=2)

    def call(turn: int) -> None:
        x = rows(4, device)
        close(model(x, **{f"name{turn}": 1}), x * 2)

    objects_kept(call, range(400))
    assert objects_kept(call, range(400, 800)) < 400


def test_graphs_captured_again_and_again_leave_nothing_behind(device: torch.device) -> None:
    model = graphed(device, lambda m, x, **more: x * 2, max_signatures=2, on_too_many_signatures="flush")

    def call(turn: int) -> None:
        x = rows(4, device)
        for _ in range(3):
            close(model(x, **{f"name{turn % 6}": 1}), x * 2)

    objects_kept(call, range(20))
    assert objects_kept(call, range(20, 60)) < 40
    assert model.graph_stats.flushes > 20


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def buffers(model: Any) -> list[weakref.ref[Any]]:
    return [weakref.ref(tensor.untyped_storage()) for tensor in model.static_inputs().values()]


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("way", ["reset_graphs", "configure_graphs"])
def test_static_inputs_go_back_without_a_collection(device: torch.device, way: str) -> None:
    model = graphed(device, lambda m, x: x * 2)
    model.capture_graphs(rows(4, device))
    model(rows(3, device))
    held = buffers(model)
    assert all(storage() is not None for storage in held)
    getattr(model, way)()
    assert all(storage() is None for storage in held)
