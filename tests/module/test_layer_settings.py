"""Numbers of torch's own layers that are set between calls, such as `LayerNorm.eps`: no replay uses the old ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.guard import guards as state
from simplegraph.guard.survey import Survey

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = 4


class Norm(nn.LayerNorm):
    """A user's layer that is derived from one of torch's, with a number of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.rate = 0.25


SETTINGS = {
    "LayerNorm.eps": (lambda: nn.LayerNorm(WIDTH), "eps", 0.5),
    "LayerNorm.eps, of a class derived from it": (lambda: Norm(), "eps", 0.5),
    "BatchNorm.eps": (lambda: nn.BatchNorm1d(WIDTH), "eps", 0.5),
    "GroupNorm.num_groups": (lambda: nn.GroupNorm(1, WIDTH), "num_groups", 2),
    "LeakyReLU.negative_slope": (lambda: nn.LeakyReLU(), "negative_slope", 0.75),
    "GELU.approximate": (lambda: nn.GELU(), "approximate", "tanh"),
    "Softmax.dim": (lambda: nn.Softmax(1), "dim", 0),
    "RMSNorm.eps, from none": (lambda: nn.RMSNorm(WIDTH), "eps", 0.5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_changed_between_calls_is_used(name: str, device: torch.device) -> None:
    make, key, value = SETTINGS[name]
    model = sg.wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), make()).to(device).eval(), exact_shapes=True, progress=False)
    layer, x = model[1], torch.randn(2, WIDTH, device=device)
    for now in (getattr(layer, key), value):
        setattr(layer, key, now)
        for _ in range(3):
            torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-5, atol=1e-6)
    assert (model.graph_stats.captures, model.graph_stats.recaptures) == (2, 0)


def test_a_setting_that_is_set_to_what_it_is_costs_no_look(device: torch.device, monkeypatch: Any) -> None:
    looks: list[nn.Module] = []
    monkeypatch.setattr(state, "Survey", lambda module: looks.append(module) or Survey(module))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop, self.rate = Norm(), nn.Dropout(0.5), 0.25

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.norm(x))

    model = sg.wrap(Net().to(device).eval(), exact_shapes=True, progress=False)
    x = torch.randn(2, WIDTH, device=device)
    for _ in range(3):
        model(x)
    looks.clear()
    replays = model.graph_stats.replays
    for _ in range(3):
        model.drop.p, model.norm.eps = 0.5, 1e-5  # as they are
        model(x)
    assert (looks, model.graph_stats.replays) == ([], replays + 3)


def test_another_stride_of_a_convolution_is_used(device: torch.device) -> None:
    model = sg.wrap(nn.Conv2d(1, 1, 1).to(device).eval(), capture_sizes=[2], progress=False, verify=0)
    x = torch.randn(2, 1, 4, 4, device=device)
    for _ in range(4):
        expected = model(x)
    model.stride = (2, 2)
    assert model(x).shape == (2, 1, 2, 2)
    model.stride = (1, 1)
    assert torch.equal(model(x), expected)
    assert model.graph_stats.recaptures == 0
