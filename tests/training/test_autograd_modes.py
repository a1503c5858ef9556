"""Modes of autograd that begin after a capture: calls under them are eager's, and replays go on when they end."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason

Make = Callable[[torch.device], tuple[Any, nn.Module]]
packed: list[torch.Size] = []


def pack(tensor: Tensor) -> Tensor:
    packed.append(tensor.shape)
    return tensor * 2  # as a lossy compression would, so that gradients show if it ran


def unpack(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.set_detect_anomaly(True)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(False)


@contextlib.contextmanager
def detecting() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = torch.autograd.detect_anomaly(check_nan=True)
    with context:
        yield


MODES: dict[str, tuple[Callable[[], AbstractContextManager[object]], Reason]] = {
    "set_detect_anomaly": (anomaly, Reason.TRANSFORMED),
    "detect_anomaly": (detecting, Reason.TRANSFORMED),
    "saved_tensors_hooks": (lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack), Reason.HOOKS),
    "save_on_cpu": (torch.autograd.graph.save_on_cpu, Reason.HOOKS),
    "disabled hooks": (lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks in here"), Reason.HOOKS),
}


def whole_step(device: torch.device) -> tuple[Any, nn.Module]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

    @sg.train_step(optimizers=optimizer)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def wrapped_module(device: torch.device) -> tuple[Any, nn.Module]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)
    graphed = sg.wrap(model, training=True)

    def step(x: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = None
        loss = graphed(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        return loss.detach()

    step.graph_stats = graphed.graph_stats  # type: ignore[attr-defined]
    return step, model


def forces(device: torch.device) -> tuple[Any, nn.Module]:
    """A function that computes gradients itself, called without grad mode."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).to(device)

    @torch.no_grad()
    def force(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(model(leaf).square().sum(), leaf)
        return found

    return sg.wrap(force, exact_shapes=True), model


MAKES: dict[str, Make] = {"train_step": whole_step, "training=True": wrapped_module, "a function": forces}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", MAKES)
def test_calls_under_a_mode_are_eagers_and_replays_go_on_after_it(kind: str, mode: str, device: torch.device) -> None:
    context, reason = MODES[mode]
    results: list[list[Tensor]] = []
    graphed: Any = None
    counts = []
    for eager in (True, False):
        torch.manual_seed(0)
        graphed, model = MAKES[kind](device)
        found: list[Tensor] = []
        with sg.eager() if eager else contextlib.nullcontext():
            for call in range(12):
                with context() if 5 <= call < 8 else contextlib.nullcontext():
                    before = len(packed)
                    found.append(graphed(torch.full((4, 6), 0.1 * (1 + call), device=device)).clone())
                    counts.append(len(packed) - before)
                found += [parameter.detach().clone() for parameter in model.parameters()]
        results.append(found)
    near = torch.allclose if device.type == "cuda" else torch.equal
    assert [at for at, pair in enumerate(zip(*results, strict=True)) if not near(*pair)] == []
    assert counts[:12] == counts[12:]
    assert any(counts) == (mode == "saved_tensors_hooks")
    stats = graphed.graph_stats
    assert stats.eager[reason] == 3
    assert stats.captures <= 2  # of a pair
    assert stats.replays >= 5


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("kind", ["train_step", "training=True"])
def test_a_nan_under_anomaly_mode_is_raised_before_it_is_in_a_weight(kind: str, device: torch.device) -> None:
    graphed, model = MAKES[kind](device)
    x = torch.ones(4, 6, device=device)
    for _ in range(5):
        graphed(x)
    assert graphed.graph_stats.replays > 0
    bad = x.clone()
    bad[0, 0] = float("nan")
    with detecting(), pytest.raises(RuntimeError, match="nan values"):
        graphed(bad)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    before = graphed.graph_stats.replays
    graphed(x)
    assert graphed.graph_stats.replays > before
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_from_the_first_call_on_is_named_in_the_report(mode: str, device: torch.device) -> None:
    context, reason = MODES[mode]
    step, _ = whole_step(device)
    with context():
        for _ in range(5):
            step(torch.ones(4, 6, device=device))
    assert set(step.graph_stats.eager) == {Reason.FIRST_CALL, reason}
    assert (step.graph_stats.captures, step.graph_stats.replays) == (0, 0)
    words = {"disabled hooks": "disable_saved_tensors_hooks", "save_on_cpu": "saved-tensor hooks"}
    expected = "saved-tensor hooks" if mode == "saved_tensors_hooks" else words.get(mode, "detect_anomaly")
    assert expected in step.graph_stats.details[reason]


@pytest.mark.filterwarnings("ignore:Error detected in", "ignore:Anomaly Detection has been enabled")
def test_a_mode_inside_of_the_step_is_eagers_at_each_call(device: torch.device) -> None:
    model = nn.Linear(6, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

    @sg.train_step(optimizers=optimizer)
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with torch.autograd.detect_anomaly():
            loss.backward()
        optimizer.step()
        return loss.detach()

    x = torch.ones(4, 6, device=device)
    for _ in range(6):
        step(x)
    with pytest.raises(RuntimeError, match="nan values"):
        step(x * float("nan"))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_calls_that_compute_no_gradients_are_replayed_under_a_mode(mode: str, device: torch.device) -> None:
    """A frozen teacher inside of a student's step, whose activations are offloaded."""
    model = sg.wrap(nn.Linear(6, 2).to(device).eval(), capture_sizes=[4])
    x = torch.ones(4, 6, device=device)
    with torch.no_grad():
        for _ in range(4):
            model(x)
        before = model.graph_stats.replays
        with MODES[mode][0]():
            model(x)
    assert model.graph_stats.replays == before + 1
