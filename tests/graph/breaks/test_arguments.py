"""Whatever a break is passed, it reads as it is at the replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from run_log import unwatched
from torch import Tensor, nn

import simplegraph as sg
from tests.graph.breaks.models import Model, check_equal, graphs, piecewise, stack

pytestmark = pytest.mark.usefixtures("inference_mode")


class Metadata:
    """Metadata that an engine sets before every step."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.tables: dict[str, float] = {"bias": 0.0}


@pytest.mark.parametrize("passed", ["object", "dict", "context", "dict beside a tensor"])
def test_what_a_break_reads_is_read_at_every_replay(device: torch.device, passed: str) -> None:
    metadata = Metadata()

    @sg.eager_break
    def reading(x: Tensor, given: Any) -> Tensor:
        if passed == "dict beside a tensor":
            x, given = given
        if "dict" in passed:
            return x + given["bias"]
        return x * (given or metadata).scale

    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            beside = x + 1, metadata.tables
            given = {"object": metadata, "dict": metadata.tables, "context": None, "dict beside a tensor": beside}
            return reading(x + 1, given[passed]) * 2

    module = Reading()
    model = piecewise(module, device, capture_sizes=[4])
    for step in range(6):
        metadata.scale = metadata.tables["bias"] = float(step)
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 5


def test_containers_of_captured_tensors_are_new_ones_at_every_replay(device: torch.device) -> None:
    replaying = False

    @sg.eager_break
    def greedy(parts: list[Tensor], named: dict[str, Any]) -> Tensor:
        total = parts[0] * named["factor"] + parts[1]
        assert len(parts) == 2
        if replaying:
            parts.append(total)
            named["factor"] = None
        return total

    class Lists(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return greedy([x + 1, x + 2], {"factor": x * 3}) * 2

    module = Lists()
    model = piecewise(module, device, capture_sizes=[4])
    model(torch.randn(4, 4, device=device))
    replaying = True
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 4


def test_an_object_returned_by_one_break_reaches_the_next_anew_at_every_replay(device: torch.device) -> None:
    class Work:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    start = sg.eager_break(lambda x: Work(x * 3))
    finish = sg.eager_break(lambda work, x: work.value + x)

    class Overlapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            work = start(x + 1)
            other = x * 5
            return finish(work, other) * 2

    module = Overlapped()
    model = piecewise(module, device)
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 2


def test_a_tensor_that_only_a_break_reads_is_kept_alive(device: torch.device) -> None:
    holder = unwatched(table=torch.full((4,), 7.0, device=device))

    class Borrowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Model.middle_of(x * 1, holder().table)

    Model.middle_of = staticmethod(sg.eager_break(lambda x, table: x + table))  # type: ignore[attr-defined]
    model = piecewise(Borrowing(), device, capture_sizes=[4])
    x = torch.zeros(4, 4, device=device)
    for _ in range(3):
        model(x)
    del holder().table
    for _ in range(20):
        torch.full((4,), float("nan"), device=device)
        assert model(x)[0, 0].item() == 7


def test_a_replaced_weight_is_read_by_breaks_and_segments(device: torch.device) -> None:
    module = stack(1)
    sg.break_at(module, "*.attn")
    model = piecewise(module, device)
    check_equal(model, module, device)
    module[0].attn.proj.weight = nn.Parameter(torch.randn(4, 4, device=device))
    module[0].mlp.weight.data = torch.randn(4, 4, device=device)
    check_equal(model, module, device)


@pytest.mark.parametrize("held", ["an attribute", "a list"])
@pytest.mark.parametrize("capture", ["lazy", "upfront"])
def test_a_replaced_tensor_that_only_a_break_is_passed_is_noticed(
    device: torch.device, held: str, capture: str
) -> None:
    add = sg.eager_break(lambda x, table: x + table)

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(4, device=device)
            self.tables = [torch.ones(4, device=device)]

        def forward(self, x: Tensor) -> Tensor:
            return add(x * 2, self.table if held == "an attribute" else self.tables[0]) * 3

    module = Passing()
    model = piecewise(module, device, capture=capture)
    for value in (1.0, 2.0, 3.0):
        module.table = torch.full((4,), value, device=device)
        module.tables[0] = torch.full((4,), value, device=device)
        if capture == "upfront":
            model.capture_graphs(torch.randn(4, 4, device=device))
        check_equal(model, module, device)
