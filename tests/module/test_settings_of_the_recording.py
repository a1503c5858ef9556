"""Settings of torch that a forward, or torch beneath it, changes at its first run: graphs are still found."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.usefixtures("no_grad")

ORDERS = [[1, 2, 0, 3, 4], [2, 1, 0, 3, 4]]


@pytest.fixture(autouse=True)
def _order() -> Iterator[None]:
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
    yield
    torch._C._set_sdp_priority_order(before)


class SetsOrder(nn.Module):
    """Sets another order of attention kernels, as torch itself does at a process's first attention on some GPUs."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.orders = itertools.cycle(ORDERS) if always else itertools.repeat(ORDERS[0])

    def forward(self, x: Tensor) -> Tensor:
        torch._C._set_sdp_priority_order(next(self.orders))
        return self.linear(x)


def test_graphs_captured_at_the_first_run_serve_every_call(device: torch.device) -> None:
    module = SetsOrder().to(device).eval()
    model = sg.wrap(module, capture_sizes=[1, 2, 4], capture="upfront", progress=False, verify=0)
    summary = model.capture_graphs(torch.randn(3, 4, device=device))
    assert summary.captured == 3
    for rows in (4, 1, 2, 3):
        x = torch.randn(rows, 4, device=device)
        torch.testing.assert_close(model(x), module.linear(x))
    assert model.graph_stats.replays == 4
    assert not model.graph_stats.eager


def test_lazy_captures_happen_once(device: torch.device) -> None:
    module = SetsOrder().to(device).eval()
    model = sg.wrap(module, capture_sizes=[2], progress=False, verify=0)
    x = torch.randn(2, 4, device=device)
    for _ in range(6):
        torch.testing.assert_close(model(x), module.linear(x))
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays >= 3


def test_a_forward_that_changes_a_setting_at_every_call_runs_eagerly_with_its_name(device: torch.device) -> None:
    module = SetsOrder(always=True).to(device).eval()
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(8):
        torch.testing.assert_close(model(x), module.linear(x))
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.PYTHON_STATE] >= 4
    assert "sdp_priority_order" in model.graph_stats.details[Reason.PYTHON_STATE]
    with pytest.raises(sg.InputError, match="sdp_priority_order"):
        model.capture_graphs(x)


def test_a_setting_that_the_capture_is_first_to_change_costs_eager_calls_and_no_answer(device: torch.device) -> None:
    class SetsOrderInCapture(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if graph_device(device).is_capturing():
                torch._C._set_sdp_priority_order(ORDERS[0])
            return super().forward(x)

    module = SetsOrderInCapture(4, 4).to(device).eval()
    model = sg.wrap(module, capture_sizes=[2], progress=False, verify=0)
    x = torch.randn(2, 4, device=device)
    for _ in range(6):
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.eager[Reason.PYTHON_STATE] == 1
    assert "sdp_priority_order" in model.graph_stats.details[Reason.PYTHON_STATE]
    assert model.graph_stats.replays >= 2


def test_a_setting_changed_after_the_capture_is_named(device: torch.device) -> None:
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[2], capture="upfront", progress=False, verify=0)
    x = torch.randn(2, 4, device=device)
    model.capture_graphs(x)
    torch._C._set_sdp_priority_order(ORDERS[0])
    model(x)
    assert model.graph_stats.eager == {Reason.NOT_CAPTURED_UPFRONT: 1}
    detail = model.graph_stats.details[Reason.NOT_CAPTURED_UPFRONT]
    assert detail == "sdp_priority_order changed from (0, 1, 2, 3, 4) to (1, 2, 0, 3, 4)"
    torch._C._set_sdp_priority_order([0, 1, 2, 3, 4])
    model(x)
    assert model.graph_stats.replays == 1


def test_an_argument_unlike_the_captured_one_is_named(device: torch.device) -> None:
    model = sg.wrap(
        nn.Conv2d(2, 2, 1).to(device).eval(), capture_sizes=[2], capture="upfront", progress=False, verify=0
    )
    x = torch.randn(2, 2, 3, 5, device=device)
    model.capture_graphs(x)
    model(x.to(memory_format=torch.channels_last))
    assert "input" in model.graph_stats.details[Reason.NOT_CAPTURED_UPFRONT]
    assert "strides" in model.graph_stats.details[Reason.NOT_CAPTURED_UPFRONT]
    model(torch.randn(3, 2, 3, 5, device=device))
    assert model.graph_stats.eager[Reason.BATCH_TOO_LARGE] == 1
