"""Constants that a forward makes of Python data, as models do; on both devices."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason

IDIOMS: dict[str, Callable[[Tensor], Any]] = {
    "torch.tensor(0.5, device=)": lambda x: x * torch.tensor(0.5, device=x.device),
    "torch.tensor([...], device=)": lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "torch.as_tensor([...], device=)": lambda x: x + torch.as_tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "new_tensor([...])": lambda x: x * x.new_tensor([1.0, 2.0, 3.0, 4.0]),
    "x[..., [-2]]": lambda x: x[..., [-2]],
    "arange().to()": lambda x: x + torch.arange(4).to(x.device),
    "arange().to(dtype)": lambda x: x + torch.arange(4).to(device=x.device, dtype=torch.float64),
    "linspace().to(x)": lambda x: x * torch.linspace(0, 1, 4).to(x),
    "a CPU index": lambda x: x[:, torch.tensor([2, 0])],
    "a mask made on the CPU": lambda x: x.masked_fill(torch.ones(4, 4).triu(1).bool()[0].to(x.device), 7.0),
    "put by a list": lambda x: x.clone().index_put_((torch.tensor([0]).to(x.device),), torch.ones(4).to(x)),
    "assigned by a list": lambda x: _assigned(x),
    "torch.where": lambda x: torch.where(x > 0, x, torch.tensor(-1.0)),
    "a number of the CPU": lambda x: x * torch.tensor(3.0),
    "written after": lambda x: torch.tensor([[0.0] * 4] * len(x), device=x.device).add_(x),
    "a size of Python's": lambda x: x / torch.tensor([float(x.shape[0])], device=x.device),
    "returned": lambda x: (x, torch.tensor([1, 2, 3], device=x.device)),
}


def _assigned(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, [1, 3]] = 0.25
    return y


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("idiom", IDIOMS)
def test_constants_of_python_are_in_the_graph_to_the_bit(device: torch.device, idiom: str, grad_mode: Any) -> None:
    model = sg.wrap(Applied(IDIOMS[idiom]).to(device).eval(), capture_sizes=[2, 4], padding=False)
    with grad_mode():
        for size in (4, 2, 4, 2, 4, 2, 4, 2):
            x = torch.randn(size, 4, device=device)
            for found, expected in zip(flat(model(x)), flat(IDIOMS[idiom](x)), strict=True):
                assert found.dtype is expected.dtype
                assert torch.equal(found, expected)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 4


def test_constants_that_follow_the_size_are_right_at_every_size(device: torch.device, no_grad: None) -> None:
    def forward(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0 / len(x)] * 4, device=x.device) + torch.arange(len(x)).to(x).unsqueeze(1)

    model = sg.wrap(Applied(forward).to(device).eval(), capture_sizes=[1, 2, 3, 4], padding=False, progress=False)
    summary = model.capture_graphs(torch.randn(4, 4, device=device))
    assert (summary.captured, summary.failed) == (4, {})
    for size in (1, 2, 3, 4):
        x = torch.randn(size, 4, device=device)
        assert torch.equal(model(x), forward(x))
    assert model.graph_stats.replays == 4


def test_a_padded_graph_has_the_constants_of_its_own_size(device: torch.device, no_grad: None) -> None:
    model = sg.wrap(Applied(lambda x: x + torch.tensor([[float(row)] for row in range(len(x))], device=x.device)))
    model.configure_graphs(capture_sizes=[4, 8])
    model.eval()
    for size in (2, 3, 4, 3, 2, 5, 7, 5, 3, 2, 4, 7):
        x = torch.randn(size, 4, device=device)
        assert torch.equal(model(x), x + torch.arange(size, device=device)[:, None])
    assert model.graph_stats.failures == {}
    assert model.graph_stats.captures == 2
    assert model.graph_stats.padded_tokens > 0


def test_what_the_forward_writes_into_a_constant_is_gone_at_the_next_call(device: torch.device, no_grad: None) -> None:
    model = sg.wrap(Applied(IDIOMS["written after"]).to(device).eval(), capture_sizes=[2], padding=False)
    for value in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert torch.equal(model(torch.full((2, 4), value, device=device)), torch.full((2, 4), value, device=device))
    assert model.graph_stats.replays >= 2


def test_a_constant_returned_is_the_callers_own(device: torch.device, no_grad: None) -> None:
    model = sg.wrap(Applied(IDIOMS["returned"]).to(device).eval(), capture_sizes=[2], padding=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(4):
        found = model(x)[1]
        assert found.tolist() == [1, 2, 3]
        found.zero_()
    assert model.graph_stats.replays


def test_a_value_that_changes_from_run_to_run_is_refused_with_the_line(device: torch.device, no_grad: None) -> None:
    values = ctypes.c_long()  # Python state that advances would be the reason

    def value() -> float:
        values.value += 1
        return float(values.value)

    model = sg.wrap(Applied(lambda x: x + torch.tensor([value()] * 4, device=x.device)), capture_sizes=[2])
    model.eval()
    x = torch.zeros(2, 4, device=device)
    seen = [model(x)[0, 0].item() for _ in range(5)]
    assert sorted(set(seen)) == seen  # every call has the next value
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 1
    (message,) = model.graph_stats.failures.values()
    assert "test_constants.py" in message
    assert "has another value than in the warmup before" in message


def test_a_reset_gives_the_memory_of_constants_back(device: torch.device, no_grad: None) -> None:
    model = sg.wrap(Applied(IDIOMS["written after"]).to(device).eval(), capture_sizes=[2, 4], padding=False)
    model.capture_graphs(torch.randn(4, 4, device=device))
    programs = [graph.program for graph in model.graph_manager.table.graphs.values()]
    held = [weakref.ref(constant) for program in programs for constant in program.constants]
    assert len(held) == 2
    del programs
    model.reset_graphs()
    gc.collect()
    assert [constant() for constant in held] == [None, None]


def test_graphs_captured_again_have_their_constants(device: torch.device, no_grad: None) -> None:
    linear = nn.Linear(4, 4).to(device)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)

    model: Any = sg.wrap(Scaled().eval(), capture_sizes=[2])
    x = torch.randn(2, 4, device=device)
    for _ in range(2):
        for _ in range(4):
            torch.testing.assert_close(model(x), linear(x) * torch.arange(1.0, 5.0, device=device))
        before = model.graph_stats.replays
        model(x)
        assert model.graph_stats.replays == before + 1
        linear.weight.data = torch.randn(4, 4, device=device)


def test_constants_beside_breaks(device: torch.device, no_grad: None) -> None:
    @sg.eager_break
    def attention(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)

    def forward(x: Tensor) -> Tensor:
        return attention(x + torch.tensor([1.0] * 4, device=x.device)) * torch.tensor([2.0] * 4, device=x.device)

    model = sg.wrap(Applied(forward).to(device).eval(), capture_sizes=[2, 4], mode="PIECEWISE")
    for size in (4, 2, 4, 2, 4, 2, 4, 2):
        x = torch.randn(size, 4, device=device)
        assert torch.equal(model(x), forward(x))
    assert model.graph_stats.replays >= 4
