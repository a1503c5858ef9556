"""Python state that a forward reads: with `state_key`, no graph of another state is replayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import simplegraph as sg
from simplegraph import Reason

WIDTH = 8


class LoraLinear(nn.Module):
    """Does by hand what adapter libraries do: a base weight, adapters by name, and Python that chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.down = nn.ParameterDict({name: torch.randn(2, WIDTH) for name in "ab"})
        self.up = nn.ParameterDict({name: torch.randn(WIDTH, 2) for name in "ab"})
        self.active, self.merged, self.scale = "a", False, 0.5

    def delta(self) -> torch.Tensor:
        return self.scale * self.up[self.active] @ self.down[self.active]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = F.linear(x, self.weight)
        if self.merged:
            return base
        return base + self.scale * F.linear(F.linear(x, self.down[self.active]), self.up[self.active])

    def merge(self, *, replace: bool = False) -> None:
        with torch.no_grad():
            merged = self.weight + self.delta()
            if replace:
                self.weight.data = merged
            else:
                self.weight.data.copy_(merged)
        self.merged = True

    def unmerge(self) -> None:
        with torch.no_grad():
            self.weight.data -= self.delta()
        self.merged = False


def state_of(model: LoraLinear) -> tuple[str, bool, float]:
    return model.active, model.merged, model.scale


def graphed(device: torch.device, **settings) -> LoraLinear:
    settings = {"capture_sizes": [2, 4], "batch_dims": {"x": 0}, "progress": False} | settings
    return sg.wrap(LoraLinear().to(device).eval(), **settings)


def assert_replays_eager(model: LoraLinear, device: torch.device, *, calls: int = 4) -> None:
    """Right at every call on the way to a graph, and the last is a replay."""
    replays = model.graph_stats.replays
    for _ in range(calls):
        x = torch.randn(3, WIDTH, device=device)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-3, atol=1e-4)
    assert model.graph_stats.replays > replays


@torch.inference_mode()
def test_switching_back_and_forth_replays_each_states_own_graph(device):
    model = graphed(device, state_key=state_of)
    for active in "abababab":
        model.active = active
        assert_replays_eager(model, device)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.recaptures == 0


@torch.no_grad()
@pytest.mark.parametrize("replace", [False, True], ids=["in place", "replaced"])
def test_merging_and_unmerging_is_followed(device, replace):
    model = graphed(device, state_key=state_of)
    assert_replays_eager(model, device)
    for _ in range(2):
        model.merge(replace=replace)
        assert_replays_eager(model, device)
        model.unmerge()
        assert_replays_eager(model, device)


@torch.inference_mode()
def test_a_number_that_the_forward_reads(device):
    model = graphed(device, state_key=state_of)
    for scale in (0.5, 2.0, -1.0, 0.5):
        model.scale = scale
        assert_replays_eager(model, device)


@torch.inference_mode()
def test_a_state_changed_between_two_threads_of_sizes_and_ways_to_pass_arguments(device):
    model = graphed(device, state_key=state_of)
    for active in "ab" * 6:
        model.active = active
        for rows in (1, 2, 3, 4):
            x = torch.randn(rows, WIDTH, device=device)
            expected = sg.unwrap(model)(x)
            torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(model(x=x), expected, rtol=1e-3, atol=1e-4)
    assert model.graph_stats.captures == 4
    assert model.graph_stats.replays > 40


@torch.inference_mode()
def test_capture_graphs_captures_the_state_at_hand(device):
    model = graphed(device, state_key=state_of, capture="upfront")
    x = torch.randn(4, WIDTH, device=device)
    model.capture_graphs(x)
    model(x)
    assert model.graph_stats.replays == 1
    model.active = "b"
    torch.testing.assert_close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.eager[Reason.NOT_CAPTURED_UPFRONT] == 1
    said = "the state changed from ('a', False, 0.5) to ('b', False, 0.5); active changed"
    assert model.graph_stats.details[Reason.NOT_CAPTURED_UPFRONT] == said
    model.capture_graphs(x)
    torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-3, atol=1e-4)
    assert model.graph_stats.replays == 2


def test_a_state_that_cannot_be_hashed_is_an_error_that_says_so(device):
    model = graphed(device, state_key=lambda module: [module.active])
    with pytest.raises(sg.InputError, match=r"state_key returned \['a'\]"), torch.inference_mode():
        model(torch.randn(2, WIDTH, device=device))


def test_a_state_key_that_is_no_function_is_refused():
    with pytest.raises(sg.ConfigError, match="state_key is 'active'; expected a function"):
        sg.CudaGraphConfig(state_key="active")


@torch.inference_mode()
def test_configuring_another_state_key_takes_effect(device):
    model = graphed(device, state_key=state_of)
    assert_replays_eager(model, device)
    model.configure_graphs(state_key=lambda module: module.scale)
    assert_replays_eager(model, device)
    model.scale = 3.0
    assert_replays_eager(model, device)


class QuantisedLinear(nn.Module):
    """int8 weight and scales in buffers, which move to where the first call is, as some libraries have it."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.register_buffer("scales", weight.abs().amax(1, keepdim=True) / 127)
        self.register_buffer("weight", (weight / self.scales).round().to(torch.int8))
        self.state = None  # made at the first call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.state is None:
            self.state = {"scales": self.scales.clone()}
        return F.linear(x, self.weight.to(x.dtype) * self.state["scales"])


@torch.inference_mode()
def test_quantised_buffers_made_lazily_and_replaced_later(device):
    model = sg.wrap(QuantisedLinear().to(device).eval(), capture_sizes=[2, 4], batch_dims={"x": 0}, progress=False)
    assert_replays_eager(model, device)
    model.weight = -model.weight  # another checkpoint
    assert_replays_eager(model, device)
    model.state = {"scales": model.scales * 3}  # requantised
    assert_replays_eager(model, device)
    model.scales.mul_(5)  # no graph reads it any more
    model.state["scales"].mul_(2)  # in place: the graph reads the new values
    assert_replays_eager(model, device)
    model.state["scales"] = model.scales.clone()
    assert_replays_eager(model, device)
    model.state = None
    assert_replays_eager(model, device)
