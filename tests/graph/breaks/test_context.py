"""Breaks see the modes, sizes and wrappers around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import CaptureError
from tests.graph.breaks.models import Model, Returning, check_equal, doubled, graphs, piecewise

pytestmark = pytest.mark.usefixtures("inference_mode")


@sg.eager_break
def double_into(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


def modes(device: torch.device) -> tuple[Any, ...]:
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


CONTEXTS: dict[str, Callable[[str], Any]] = {
    "no_grad": lambda kind: torch.no_grad(),
    "inference_mode": lambda kind: torch.inference_mode(),
    "out of inference_mode": lambda kind: torch.inference_mode(False),
    "autocast": lambda kind: torch.autocast(kind, dtype=torch.bfloat16),
    "no autocast": lambda kind: torch.autocast(kind, enabled=False),
}


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inner", CONTEXTS)
def test_a_break_sees_the_modes_that_the_forward_sets_around_it(
    device: torch.device, outer: Callable[[], Any], inner: str
) -> None:
    seen: list[tuple[Any, ...]] = []
    look = sg.eager_break(lambda x: seen.append(modes(device)))

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            with CONTEXTS[inner](device.type):
                look(hidden)
            return hidden * 2

    model = piecewise(Around(), device, capture_sizes=[4])
    with torch.inference_mode(False), outer():
        for _ in range(5):
            model(torch.randn(4, 4, device=device))
    assert model.graph_stats.replays == 4
    assert len(seen) == 5
    assert len(set(seen)) == 1


def test_a_break_in_grad_mode_builds_no_autograd_graph(device: torch.device) -> None:
    module = Returning(lambda x: x + 1)  # no parameters: grad mode alone does not keep it from graphs
    model = piecewise(module, device, capture_sizes=[4])
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(5):
            x = torch.randn(4, 4, device=device)
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0)[0],
        lambda x: x.set_(torch.ones_like(x)),
    ],
    ids=["unsqueeze_", "set_"],
)
def test_a_break_that_reshapes_or_repoints_its_argument_keeps_that_size_eager(
    device: torch.device, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    module = Model(sg.eager_break(change))
    model = piecewise(module, device, capture_sizes=[4])
    x = torch.randn(4, 4, device=device)
    for _ in range(4):
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.eager[sg.Reason.CAPTURE_FAILED] == 3
    assert "reshapes or re-points a tensor it is passed" in next(iter(model.graph_stats.failures.values()))


def test_breaks_may_differ_between_sizes(device: torch.device) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            if x.shape[0] > 2:
                double_into(hidden, out := torch.empty_like(hidden))
                hidden = out
            return doubled(hidden) * 2

    module = Branching()
    model = piecewise(module, device, capture="upfront")
    model.capture_graphs(torch.randn(4, 4, device=device))
    check_equal(model, module, device)
    assert sorted(graph.breaks for graph in graphs(model)) == [1, 2]


def test_a_break_that_calls_a_wrapped_module_runs_it_eagerly(device: torch.device) -> None:
    inner_module = nn.Linear(4, 4)
    inner = piecewise(inner_module, device, mode="FULL")
    module = Model(sg.eager_break(lambda x: inner(x)))
    model = piecewise(module, device)
    check_equal(model, module, device)
    replays = inner.graph_stats.replays
    model(torch.randn(4, 4, device=device))
    assert inner.graph_stats.replays == replays
    assert inner.graph_stats.eager[sg.Reason.NESTED] > 0


def test_a_break_that_enters_its_own_wrapper_again_gets_eagers_answer(device: torch.device) -> None:
    models: list[Any] = []

    @sg.eager_break
    def again(x: Tensor, depth: int) -> Tensor:
        return models[0](x, depth - 1) if depth else x * 2

    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return again(x + 1, depth) * 3

    module = Recursive()
    models.append(piecewise(module, device))
    check_equal(models[0], module, device)


@pytest.mark.parametrize("what", ["capture_graphs", "reset_graphs"])
def test_graphs_are_not_replaced_from_inside_a_forward(device: torch.device, what: str) -> None:
    models: list[Any] = []
    active: list[bool] = []

    @sg.eager_break
    def meddle(x: Tensor) -> None:
        if active:
            models[0].reset_graphs() if what == "reset_graphs" else models[0].capture_graphs(x)

    class Meddling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            meddle(hidden)
            return hidden * 2

    models.append(piecewise(Meddling(), device, capture_sizes=[4]))
    x = torch.randn(4, 4, device=device)
    for _ in range(3):
        models[0](x)
    active.append(True)
    with pytest.raises(CaptureError, match=f"{what} was called inside"):
        models[0](x)
    active.clear()
    torch.testing.assert_close(models[0](x), (x + 1) * 2)


def test_a_compiler_sees_through_a_break() -> None:
    tripled = sg.eager_break(lambda x: x * 3)
    compiled = torch.compile(lambda x: tripled(x) + 1, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 4


def test_a_traced_module_with_breaks_runs_as_it_is(device: torch.device) -> None:
    module = Model().to(device).eval()
    x = torch.randn(3, 4, device=device)
    with torch.inference_mode(False), torch.no_grad():
        traced = torch.jit.trace(module, (x,), check_trace=False)
        torch.testing.assert_close(traced(x), module(x))
