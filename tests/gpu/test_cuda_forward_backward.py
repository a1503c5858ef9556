"""Forward and backward graphs on a real GPU: eager's gradients, and those of torch's own graphed callables."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import reasons
from tests.training.models import MODELS, assert_same, batches, made, train, twins

DEVICE = torch.device("cuda")
pytestmark = pytest.mark.usefixtures("device_left_alone")


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.proofs
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_is_eagers_to_the_bit(deterministic: None, name: str, optimizer: str) -> None:
    plain, model = twins(functools.partial(without_cudnns_dropout, MODELS[name]), DEVICE)
    data = batches(50, DEVICE)
    expected = train(plain, OPTIMIZERS[optimizer](plain.parameters()), data)
    actual = train(model, OPTIMIZERS[optimizer](model.parameters()), data)
    assert reasons(model) == {"first_call": 1, "proof": 1}
    assert torch.equal(actual, expected)
    assert_same(model, plain)


def without_cudnns_dropout(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model whose recurrent layers drop nothing between them."""
    model = make()
    for child in model.modules():
        if isinstance(child, nn.RNNBase):
            child.dropout = 0.0
    return model


def test_dropout_between_recurrent_layers_is_eagers_and_says_why(deterministic: None) -> None:
    """Its numbers are cuDNN's own: a reseeding for a capture would change those that come next."""
    plain, model = twins(MODELS["recurrent"], DEVICE)
    data = batches(10, DEVICE)
    expected = train(plain, OPTIMIZERS["adam"](plain.parameters()), data)
    actual = train(model, OPTIMIZERS["adam"](model.parameters()), data)
    assert torch.equal(actual, expected)
    assert_same(model, plain)
    assert reasons(model) == {"first_call": 1, "capture_failed": 9}
    assert all("cuDNN" in failure for failure in model.graph_stats.failures.values())


@pytest.mark.proofs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mlp", "images", "attention"])
def test_autocast_and_a_scaler_give_eagers_weights_to_the_bit(deterministic: None, name: str, dtype: Any) -> None:
    plain, model = twins(MODELS[name], DEVICE)
    losses = []
    for each in (plain, model):
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        for x, y in batches(20, DEVICE):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype):
                loss = nn.functional.cross_entropy(each(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
    assert reasons(model) == {"first_call": 1, "proof": 1}
    assert torch.equal(torch.stack(losses[:20]), torch.stack(losses[20:]))
    assert_same(model, plain)


def test_answers_are_those_of_torchs_graphed_callables(deterministic: None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))

    model = sg.wrap(made(make, DEVICE), training=True)
    other = made(make, DEVICE)
    theirs = torch.cuda.make_graphed_callables(copy.deepcopy(other), (torch.randn(8, 64, device=DEVICE),))
    ours_by_sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    theirs_by_sgd = torch.optim.SGD(theirs.parameters(), lr=0.05)
    for _ in range(20):
        x = torch.randn(8, 64, device=DEVICE)
        for each, optimizer in ((model, ours_by_sgd), (theirs, theirs_by_sgd)):
            optimizer.zero_grad(set_to_none=True)
            each(x).pow(2).mean().backward()  # of a sum, rates as high would drive the weights to infinity
            optimizer.step()
    for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    assert model.graph_stats.replays >= 36


def test_gradients_add_up_where_torchs_graphed_callables_give_twice_the_last(deterministic: None) -> None:
    plain, model = twins(lambda: nn.Linear(16, 16), DEVICE)
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(3):
            each(torch.randn(4, 16, device=DEVICE)).sum().backward()
        each.zero_grad(set_to_none=True)
        for _ in range(4):
            each(torch.randn(4, 16, device=DEVICE)).pow(2).sum().backward()
    assert_same(model, plain)


def test_leaves_used_on_another_stream_before_are_no_part_of_the_capture() -> None:
    """An autograd graph of before that is kept alive holds nodes of the default stream for each parameter."""
    model = sg.wrap(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE), training=True)
    plain = sg.unwrap(model)
    x = torch.randn(4, 16, device=DEVICE)
    kept = [plain(x).sum()]
    nodes = [parameter.view_as(parameter).grad_fn.next_functions[0][0] for parameter in plain.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kept.append(plain(x).sum())
    torch.cuda.current_stream().wait_stream(side)
    kept[0].backward()
    for _ in range(4):
        model.zero_grad()
        model(x).sum().backward()
    found = [parameter.grad.clone() for parameter in plain.parameters()]
    model.zero_grad()
    plain(x).sum().backward()
    for ours, parameter in zip(found, plain.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad)
    assert set(reasons(model)) == {"first_call"}
    assert len(nodes) == 4


def test_a_backward_on_another_stream_waits_for_its_forward() -> None:
    plain, model = twins(lambda: nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)), DEVICE)
    side = torch.cuda.Stream()
    for turn in range(6):
        torch.manual_seed(turn)
        x = torch.randn(64, 256, device=DEVICE)
        for each in (plain, model):
            each.zero_grad()
            stream = side if turn % 2 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                out = each(x)
            torch.cuda.current_stream().wait_stream(stream)
            out.pow(2).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_activation_checkpoints_without_random_state_are_captured() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, **options))

    plain, model = twins(Checkpointed, DEVICE)
    for _ in range(4):
        x = torch.randn(4, 16, device=DEVICE)
        for each in (plain, model):
            each.zero_grad()
            each(x).pow(2).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert reasons(model) == {"first_call": 1}


def test_a_read_back_in_the_forward_or_the_backward_costs_nothing() -> None:
    class Reading(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 if grad.sum().item() < 1e30 else grad

    class Module(nn.Module):
        def __init__(self, where: str) -> None:
            super().__init__()
            self.where, self.layers = where, nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))

        def forward(self, x: Tensor) -> Tensor:
            out = self.layers(x)
            if self.where == "forward" and out.sum().item() > 1e30:
                return out * 2
            return Reading.apply(out) if self.where == "backward" else out

    for where in ("forward", "backward"):
        plain, model = twins(lambda where=where: Module(where), DEVICE)
        for each in (plain, model):
            torch.manual_seed(3)
            for _ in range(4):
                each(torch.randn(8, 16, device=DEVICE)).pow(2).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        assert torch.allclose(model.layers[1].running_mean, plain.layers[1].running_mean)
        assert reasons(model) == {"first_call": 1, "capture_failed": 3}


def test_memory_of_pairs_is_given_back() -> None:
    model = sg.wrap(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(DEVICE), training=True)
    x = torch.randn(256, 512, device=DEVICE)

    def steps() -> None:
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)

    steps()
    model.reset_graphs()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        steps()
        model.reset_graphs()
        gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
