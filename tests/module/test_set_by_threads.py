"""Numbers that another thread sets while a module is captured: no graph keeps one under the key of another."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from unfollowed import unfollowed

import simplegraph as sg
from simplegraph.device.select import graph_device
from simplegraph.guard.place_history import PlaceHistory
from simplegraph.serve.runner import GraphRunner

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = 8


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.calls = nn.Linear(WIDTH, WIDTH), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)) * self.scale


class Stacked(Scaled):
    """Iterates over a container of torch, whose operators set attributes by computed names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return super().forward(x)


def expected(model: Any, x: Tensor) -> Tensor:
    found: Tensor = model.layer(x).clamp(min=0) * model.scale
    return found


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("kind", [Scaled, Stacked])
def test_a_number_that_is_set_during_the_capture_is_not_kept_nor_lost(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: type[Scaled], upfront: bool, verify: int, mode: Any
) -> None:
    model: Any = sg.wrap(kind().to(device).eval(), capture_sizes=[4], verify=verify, mode=mode, progress=False)
    relu, is_set = torch.relu, False

    def setting(y: Tensor) -> Tensor:  # the forward has not read the number yet
        nonlocal is_set
        if not is_set and graph_device(device).is_capturing():
            is_set = True
            in_thread(lambda: setattr(model, "scale", 2.0))
        return relu(y)

    monkeypatch.setattr(torch, "relu", unfollowed(setting))
    for number in range(4):
        x = torch.randn(4, WIDTH, device=device)
        if upfront and not number:
            model.capture_graphs(x)
        model(x)
    assert is_set
    assert model.scale == 2.0
    for scale in (2.0, 1.0, 2.0):
        model.scale = scale
        for _ in range(4):
            x = torch.randn(4, WIDTH, device=device)
            torch.testing.assert_close(model(x), expected(model, x))
    assert model.graph_stats.replays


@pytest.mark.parametrize("back", [False, True])
def test_a_number_that_is_set_once_during_a_capture_costs_one_capture(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    model: Any = sg.wrap(Scaled().to(device).eval(), capture_sizes=[4], progress=False)
    relu, captured = torch.relu, 0

    def setting(y: Tensor) -> Tensor:
        nonlocal captured
        if graph_device(device).is_capturing():
            captured += 1
            if captured == 1:
                in_thread(functools.partial(setattr, model, "scale", 2.0))
        return relu(y)

    monkeypatch.setattr(torch, "relu", unfollowed(setting))
    for _ in range(10):
        x = torch.randn(4, WIDTH, device=device)
        torch.testing.assert_close(model(x), expected(model, x)) if captured != 1 else model(x)
        if captured == 1 and back:
            model.scale = 1.0
    assert model.graph_stats.replays > 5


def test_another_thread_may_reset_graphs_at_any_time(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = sg.wrap(Scaled().to(device).eval(), capture_sizes=[4], progress=False)
    why, threads = PlaceHistory.why_volatile, list[threading.Thread]()

    def resetting(history: PlaceHistory) -> str:
        if not threads:
            threads.append(threading.Thread(target=model.reset_graphs))
            threads[0].start()
            threads[0].join(0.2)
        return why(history)

    monkeypatch.setattr(PlaceHistory, "why_volatile", resetting)
    for number in range(20):
        model.scale = float(number)
        x = torch.randn(4, WIDTH, device=device)
        torch.testing.assert_close(model(x), expected(model, x))
    assert threads
    threads[0].join()


@pytest.mark.parametrize("verify", [0, 1])
def test_numbers_that_one_thread_sets_while_others_call(device: torch.device, verify: int) -> None:
    model: Any = sg.wrap(Scaled().to(device).eval(), capture_sizes=[4], verify=verify, progress=False)
    stop, wrong, switch = threading.Event(), 0, sys.getswitchinterval()
    inputs = torch.randn(8, 4, WIDTH, device=device)  # on a GPU, no thread may draw numbers while another one captures

    def call() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(inputs[0])

    threads = [threading.Thread(target=call) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for number in range(120):
            model.scale = float(number * 7 % 3)
            for _ in range(1 + number % 5):
                x = inputs[number % 8]
                wrong += not torch.allclose(model(x), expected(model, x), atol=1e-5)
    finally:
        sys.setswitchinterval(switch)
        stop.set()
        for thread in threads:
            thread.join()
    assert wrong == 0


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("upfront", [False, True])
def test_a_number_that_is_set_between_the_reading_of_a_call_and_its_capture(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, upfront: bool, back: bool
) -> None:
    model: Any = sg.wrap(Scaled().to(device).eval(), capture_sizes=[4], verify=0, progress=False)
    read, others = GraphRunner._read, list[threading.Thread]()

    def setting(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        if not others:
            model.scale = 2.0
            others.append(threading.Thread(target=model, args=(torch.randn(4, WIDTH, device=device),)))
            others[0].start()  # reads the new number, and waits for this call
            others[0].join(0.2)
        return found

    model(torch.randn(4, WIDTH, device=device))
    monkeypatch.setattr(GraphRunner, "_read", setting)
    if upfront:
        model.capture_graphs(torch.randn(4, WIDTH, device=device))
    else:
        model(torch.randn(4, WIDTH, device=device))
    others[0].join()
    for scale in (1.0, 1.0, 1.0) if back else (1.0, 2.0, 1.0):
        model.scale = scale
        for _ in range(4):
            x = torch.randn(4, WIDTH, device=device)
            torch.testing.assert_close(model(x), expected(model, x))
    assert model.graph_stats.replays > 6


class Squashed(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


@pytest.mark.parametrize("when", ["relu", "sigmoid"])  # before and after the forward reads the number
@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("verify", [0, 1])
def test_a_number_that_is_set_during_any_run_of_the_first_calls(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, verify: int, rows: int, when: str
) -> None:
    original, runs, at = getattr(torch, when), 0, 0

    def setting(y: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == at:
            in_thread(functools.partial(setattr, model, "scale", 2.0))
        return cast(Tensor, original(y))

    monkeypatch.setattr(torch, when, unfollowed(setting))
    while not runs or at <= runs:
        at += 1
        model = sg.wrap(Squashed().to(device).eval(), capture_sizes=[4], verify=verify, progress=False)
        runs = 0
        for called in (4, *[rows] * 7):  # the first call shows the batch dimension
            model(torch.randn(called, WIDTH, device=device))
        assert runs < at or model.scale == 2.0
        for _ in range(8):
            x = torch.randn(rows, WIDTH, device=device)
            torch.testing.assert_close(model(x), expected(model, x).sigmoid())
        assert model.graph_stats.replays or at == 1  # what changes during the very first run, that run may have changed
        assert not model.graph_stats.failures
