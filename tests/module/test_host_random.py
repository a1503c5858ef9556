"""Random numbers of Python and NumPy: each call draws as eager's does, and captures draw none for anybody."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device

WIDTH = 4
DRAWS: dict[str, Callable[[], float]] = {"python": random.random, "numpy": numpy.random.rand}


class Noisy(nn.Module):
    """Draws a number at every run, or only while it is captured."""

    def __init__(self, draw: Callable[[], float], *, captured_alone: bool = False) -> None:
        super().__init__()
        self.linear, self.draw, self.captured_alone = nn.Linear(WIDTH, WIDTH), draw, captured_alone

    def forward(self, x: Tensor) -> Tensor:
        captured = graph_device(x.device).is_capturing()
        factor = self.draw() if captured or not self.captured_alone else 1.0
        return self.linear(x) if captured and self.captured_alone else self.linear(x) * factor


def states() -> tuple[Any, ...]:
    return random.getstate(), numpy.random.get_state()[1].tolist(), numpy.random.get_state()[2]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def answers(call: Callable[[Tensor], Tensor], device: torch.device) -> list[tuple[Tensor, Any]]:
    seed()
    return [(call(torch.full((2, WIDTH), float(n), device=device)).detach(), states()) for n in range(6)]


def assert_equal(found: list[tuple[Tensor, Any]], expected: list[tuple[Tensor, Any]]) -> None:
    for (answer, state), (other, state_of_eager) in zip(found, expected, strict=True):
        torch.testing.assert_close(answer, other)
        assert state == state_of_eager


@pytest.mark.parametrize("kind", ["wrap", "pairs"])
@pytest.mark.parametrize("name", DRAWS)
def test_each_call_draws_as_eager_does(name: str, kind: str, device: torch.device) -> None:
    net = Noisy(DRAWS[name]).to(device).train(kind == "pairs")
    model = sg.wrap(net, exact_shapes=True, progress=False, training=kind == "pairs")

    def run(called: nn.Module, x: Tensor) -> Tensor:
        if kind == "wrap":
            with torch.no_grad():
                return called(x)
        answer = called(x)
        answer.sum().backward()
        return answer

    expected = answers(lambda x: run(sg.unwrap(model), x), device)
    assert_equal(answers(lambda x: run(model, x), device), expected)
    assert "random generator whenever it runs" in str(model.graph_report())


@pytest.mark.parametrize("name", DRAWS)
def test_each_training_step_draws_as_eager_does(name: str, device: torch.device) -> None:
    results = []
    for graphed in (False, True):
        seed()
        net = Noisy(DRAWS[name]).to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.125, fused=True)

        def step_fn(x: Tensor, net: nn.Module = net, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step: Any = sg.train_step(step_fn, optimizers=optimizer, modules=[net]) if graphed else step_fn
        results.append(answers(step, device))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("no_grad")
def test_a_capture_draws_no_numbers_of_the_callers(name: str, device: torch.device) -> None:
    net = Noisy(DRAWS[name], captured_alone=True).to(device).eval()
    model = sg.wrap(net, exact_shapes=True, progress=False)
    assert_equal(answers(model, device), answers(net, device))
    assert model.graph_stats.replays >= 3


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("no_grad")
def test_runs_that_the_library_makes_by_itself_draw_no_numbers(name: str, device: torch.device) -> None:
    net = Noisy(DRAWS[name]).to(device).eval()
    model = sg.wrap(net, capture_sizes=[4], progress=False)
    x = torch.ones(4, WIDTH, device=device)
    seed()
    net(x)
    expected = states()
    seed()
    model.capture_graphs(x)  # one warmup, runs at another size, and captures that are refused
    assert states() == expected
