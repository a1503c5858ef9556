"""Guards of a steady call compare what they read once, and look no further: a survey of a model costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
import simplegraph.guard.guards as guards
from simplegraph.guard.survey import Survey


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    model[1].weight = model[0].weight
    return model


class Agent:
    def __init__(self) -> None:
        self.model, self.offset, self.factor, self.parts = tied(), torch.ones(4), 0.5, {"head": [nn.Linear(4, 4)]}

    def act(self, x: Tensor) -> Tensor:
        return self.parts["head"][0](self.model(x)) * self.factor + self.offset


def wrapped_module() -> Any:
    return torch.no_grad()(sg.wrap(tied()))


def wrapped_method() -> Any:
    return torch.no_grad()(sg.wrap(Agent().act))


def step() -> Any:
    agent = Agent()
    optimizer = torch.optim.AdamW(agent.model.parameters(), fused=True)

    def step_fn(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = agent.act(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return sg.train_step(step_fn, optimizers=optimizer)


@pytest.mark.parametrize("make", [wrapped_module, wrapped_method, step])
def test_a_steady_call_surveys_nothing(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    called, x, surveys = make(), torch.randn(2, 4), []
    for _ in range(6):
        called(x)
    found = guards.Survey

    def surveyed(module: nn.Module) -> Any:
        surveys.append(module)
        return found(module)

    monkeypatch.setattr(guards, "Survey", surveyed)
    called(x)
    surveys.clear()  # the first comparison after a capture may prepare the next ones
    for _ in range(5):
        called(x)
    assert len(surveys) == 0


def test_one_of_two_tied_weights_that_is_replaced_is_never_stale() -> None:
    model = tied()
    wrapped, x = sg.wrap(model), torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(5):
            wrapped(x)
        model[1].weight = nn.Parameter(torch.zeros(4, 4))
        assert torch.equal(wrapped(x), model[1].bias.expand(2, 4))
        model[1].weight.fill_(1)
        model[1].weight = model[0].weight
        assert torch.equal(wrapped(x), model[1](model[0](x)))


def test_a_steady_call_reads_no_tuples_of_plain_values() -> None:
    """A convolution has six; comparing them took a third of the host's time of a ResNet-50's call."""
    links = Survey(nn.Conv2d(2, 2, 1)).links
    assert {key for *_, (_, key, _) in links}.isdisjoint({"kernel_size", "stride", "padding", "dilation"})


@pytest.mark.parametrize("pair", [lambda t: (t, t), lambda t: (t,) * 2 + (1.0,), lambda t: [t, t]])
def test_numbers_in_a_tuple_of_a_module_that_become_tensors_are_never_stale(pair: Callable[[Tensor], Any]) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair: Any = (0.0, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + self.pair[0]) + self.pair[1]

    module = Scales().eval()
    wrapped = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        for _ in range(5):
            wrapped(torch.randn(4, 4))
        module.pair = pair(torch.full((4,), 2.0))
        for _ in range(5):
            x = torch.randn(4, 4)
            torch.testing.assert_close(wrapped(x), x * 3 + 2)
    assert wrapped.graph_stats.recaptures == 1


def test_a_tensor_of_a_derived_layer_is_never_stale_whatever_its_name() -> None:
    class Shifted(nn.LayerNorm):
        def __init__(self) -> None:
            super().__init__(4)
            self.padding = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.padding

    module = Shifted().eval()
    wrapped = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        for _ in range(5):
            wrapped(torch.randn(4, 4))
        module.padding = torch.full((4,), 3.0)
        for _ in range(5):
            x = torch.randn(4, 4)
            torch.testing.assert_close(wrapped(x), module(x))
    assert wrapped.graph_stats.recaptures == 1
