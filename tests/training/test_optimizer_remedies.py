"""Each remedy for an optimizer that no step's graph can hold works for that optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

OUTSIDE = "simplegraph.wrap(model, training=True)"
CALLS = 10
Make = Callable[[Any], optim.Optimizer]


class Trained:
    """What a loop trained: its weights, and what graphs served of it."""

    def __init__(self, make: Make, device: torch.device, how: str, *, scaled: bool = False, scheduled: bool = False):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False)).to(device)
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler(device.type, enabled=scaled, init_scale=4.0)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 50) if scheduled else None
        called: Any = sg.wrap(model, training=True, progress=False) if how == "outside" else model

        def step(x: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(called(x), x[:, :2])
                scaler.scale(loss).backward()
                return loss

            if isinstance(optimizer, optim.LBFGS):
                return optimizer.step(closure)  # type: ignore[arg-type, return-value]
            loss = closure()
            scaler.step(optimizer)
            scaler.update()
            return loss

        run: Any = step
        if how == "step":
            run = sg.train_step(step, optimizers=optimizer, scaler=scaler if scaled else None, progress=False)
        torch.manual_seed(1)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(CALLS):
                run(torch.randn(3, 4, device=device))
                if schedule is not None:
                    schedule.step()
        self.weights = [parameter.detach() for parameter in model.parameters()]
        self.stats = (called if how == "outside" else run).graph_stats if how != "eager" else None

    def compare(self, other: Trained) -> None:
        # Fused and capturable optimizers have formulas of their own.
        torch.testing.assert_close(self.weights, other.weights, rtol=1e-4, atol=1e-5)

    @property
    def said(self) -> str:
        assert self.stats is not None
        return " ".join([*self.stats.details.values(), *map(str, self.stats.failures.values())])


class OfTransformers:
    """Makes the Adafactor of transformers, which counts its steps in Python, and may read what it computed."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __call__(self, parameters: Any) -> optim.Optimizer:
        return pytest.importorskip("transformers.optimization").Adafactor(parameters, **self.settings)  # type: ignore[no-any-return]


class Counting(optim.SGD):
    """Descends by a number of its group that changes at every step, as schedule-free and Prodigy have it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9
        return super().step(closure)


REFUSED: dict[str, Make] = {
    "Adafactor of transformers": OfTransformers(lr=0.01, relative_step=False, scale_parameter=False),
    "Adafactor of transformers by relative steps": OfTransformers(),
    "Counting": lambda parameters: Counting(parameters, lr=0.1),
    "Adafactor": lambda parameters: optim.Adafactor(parameters, lr=0.01),
    "LBFGS": lambda parameters: optim.LBFGS(parameters, lr=0.01),
}
# On a GPU these are in a step's graph, as tests/gpu/test_cuda_training.py shows.
READING = {
    name: lambda parameters, name=name: getattr(optim, name)(parameters, lr=0.01)
    for name in ("RAdam", "NAdam", "Adamax", "ASGD")
}
UNREAD = {
    name: lambda parameters, name=name: getattr(optim, name)(parameters, lr=0.01)
    for name in ("RMSprop", "Adadelta", "Rprop")
}


@pytest.mark.parametrize("name", [*REFUSED, *READING])
def test_a_refused_optimizer_steps_outside_of_forward_and_backward_graphs(name: str, device: torch.device) -> None:
    if name in READING and device.type == "cuda":
        pytest.skip("these have capturable=True on a GPU")
    make = (REFUSED | READING)[name]
    plain, refused, followed = (Trained(make, device, how) for how in ("eager", "step", "outside"))
    refused.compare(plain)
    followed.compare(plain)
    assert not refused.stats.replays
    assert OUTSIDE in refused.said
    assert "pass fused=True" not in refused.said
    assert followed.stats.replays > 0


@pytest.mark.parametrize("name", UNREAD)
def test_an_optimizer_that_never_reads_its_step_count_is_in_the_steps_graph(name: str, device: torch.device) -> None:
    plain, served = (Trained(UNREAD[name], device, how) for how in ("eager", "step"))
    served.compare(plain)
    assert served.stats.replays >= CALLS - 4
    assert not served.said


def test_a_scheduled_muon_is_left_outside_as_it_has_no_fused_form(device: torch.device) -> None:
    def make(parameters: Any) -> optim.Optimizer:
        return optim.Muon(parameters, lr=0.01)

    plain, refused, followed = (Trained(make, device, how, scheduled=True) for how in ("eager", "step", "outside"))
    refused.compare(plain)
    followed.compare(plain)
    assert "Adam, AdamW and SGD with fused=True take lr from the device" in refused.said
    assert f"{OUTSIDE} leaves the optimizer out of graphs" in refused.said
    assert followed.stats.replays > 0


@pytest.mark.parametrize("name", ["RMSprop", "SGD"])
def test_an_optimizer_that_a_scaler_looks_at_is_told_of_a_form_that_it_has(name: str, device: torch.device) -> None:
    def make(parameters: Any, **more: Any) -> optim.Optimizer:
        return getattr(optim, name)(parameters, lr=0.01, **more)  # type: ignore[no-any-return]

    plain, refused = (Trained(make, device, how, scaled=True) for how in ("eager", "step"))
    refused.compare(plain)
    if name == "SGD":
        assert "pass fused=True" in refused.said
        followed = Trained(lambda parameters: make(parameters, fused=True), device, "step", scaled=True)
    else:
        assert "fused=True" not in refused.said
        assert OUTSIDE in refused.said
        followed = Trained(make, device, "outside", scaled=True)
    followed.compare(plain)
    assert followed.stats.replays > 0


def test_sparse_gradients_are_left_for_dense_ones(device: torch.device) -> None:
    def train(sparse: bool) -> Any:
        torch.manual_seed(0)
        table = nn.Embedding(9, 4, sparse=sparse, device=device)
        parameters = table.parameters()
        optimizer = optim.SparseAdam([*parameters]) if sparse else optim.Adam(parameters, fused=True)

        def step(ids: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = table(ids).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        graphed = sg.train_step(step, optimizers=optimizer, progress=False)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(CALLS):
                graphed(torch.arange(6, device=device))
        return graphed.graph_stats

    refused = train(True)
    assert not refused.replays
    assert "make its layers with sparse=False, and use Adam(fused=True)" in " ".join(refused.details.values())
    assert train(False).replays > 0
