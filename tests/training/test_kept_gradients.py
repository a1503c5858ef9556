"""Gradients that a graph made are eager's as long as anyone has them."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.models import WIDTH, assert_same, batches, mlp, twins

SIZES = (3, 4)


def step(model: nn.Module, x: Tensor, scale: float = 1.0) -> None:
    (model(x).square().sum() * scale).backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def ready(device: torch.device, **settings: Any) -> tuple[nn.Module, Any]:
    """A plain model, and a wrapped one that replays."""
    plain, model = twins(mlp, device, **settings)
    for x, _ in batches(3, device):
        for each in (plain, model):
            torch.manual_seed(0)
            step(each, x)
            each.zero_grad()
    return plain, model


def both(plain: nn.Module, model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Any]:
    found = []
    for each in (plain, model):
        torch.manual_seed(1)
        found.append(run(each))
    return found


def test_gradients_that_are_added_to_are_eagers(device: torch.device) -> None:
    plain, model = ready(device)
    for x, _ in batches(4, device):
        both(plain, model, lambda each, x=x: step(each, x))
        assert_same(model, plain)
    both(plain, model, lambda each: each.zero_grad(set_to_none=False))
    both(plain, model, lambda each: step(each, batches(1, device)[0][0]))
    assert_same(model, plain)
    assert sum(model.graph_stats.eager.values()) == 1


@pytest.mark.parametrize(
    "keep",
    [
        lambda each: [parameter.grad for parameter in each.parameters()],
        lambda each: [parameter.grad.view(-1)[:2] for parameter in each.parameters()],
        lambda each: [parameter.grad.detach() for parameter in each.parameters()],
        lambda each: [parameter.grad.untyped_storage() for parameter in each.parameters()],
    ],
    ids=["the tensor", "a view", "another tensor", "the storage"],
)
@pytest.mark.parametrize("cleared", [True, False])
def test_a_gradient_that_is_kept_stays_eagers(device: torch.device, keep: Callable[..., Any], cleared: bool) -> None:
    plain, model = ready(device)
    kept: list[list[Any]] = []
    for x, _ in batches(6, device):
        both(plain, model, lambda each, x=x: step(each, x))
        kept.append(both(plain, model, keep))
        if cleared:
            both(plain, model, lambda each: each.zero_grad())
        for expected, actual in kept:
            for one, other in zip(expected, actual, strict=True):
                values = (torch.tensor([]), one, other) if isinstance(one, Tensor) else (None, one, other)
                if values[0] is None:
                    one, other = (torch.tensor(list(storage.tolist())) for storage in values[1:])
                assert torch.equal(one, other)
    assert model.graph_stats.replays > 4


class Twice(nn.Module):
    """Two parameters whose gradients are one tensor to autograd, until each `.grad` gets its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.one, self.other = (nn.Parameter(torch.ones(1, WIDTH)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum(0, keepdim=True) + (self.one + self.other) * 2


def test_gradients_that_one_tensor_is_do_not_share_memory(device: torch.device) -> None:
    plain, model = twins(Twice, device)
    for x, _ in batches(5, device):
        both(plain, model, lambda each, x=x: step(each, x))
        both(plain, model, lambda each: [gradient.mul_(0.5) for gradient in gradients(each)])
        assert_same(model, plain)
        both(plain, model, lambda each: each.zero_grad())
    assert model.graph_stats.replays >= 6


def test_another_thread_adds_to_gradients_of_the_first_one(device: torch.device) -> None:
    plain, model = ready(device)
    x = batches(1, device)[0][0]
    both(plain, model, lambda each: step(each, x))
    for _ in range(3):
        thread = threading.Thread(target=both, args=(plain, model, lambda each: step(each, x)))
        thread.start()
        thread.join()
        assert_same(model, plain)
    both(plain, model, lambda each: step(each, x))
    assert_same(model, plain)


def test_gradients_outlive_the_graphs(device: torch.device) -> None:
    plain, model = ready(device)
    x = batches(1, device)[0][0]
    both(plain, model, lambda each: step(each, x))
    model.reset_graphs()
    assert_same(model, plain)
    for _ in range(4):
        both(plain, model, lambda each: step(each, x))
        assert_same(model, plain)
    parameters = list(model.parameters())
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    del model
    gc.collect()
    assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected, strict=True))


@pytest.mark.parametrize("seed", range(24))
def test_any_order_of_steps_and_of_what_is_kept(device: torch.device, seed: int) -> None:
    """Two sizes in one pool; gradients are added to and cleared; they and outputs are kept, and dropped again."""
    chosen = random.Random(seed)
    plain, model = twins(mlp, device)
    kept: list[tuple[list[Tensor], list[Tensor]]] = []
    pending: list[tuple[Tensor, Tensor]] = []

    def keep(read: Callable[[nn.Module], list[Tensor]]) -> None:
        if gradients(plain):
            kept.append(tuple(both(plain, model, read)))  # type: ignore[arg-type]

    def later() -> None:
        pending.append(tuple(both(plain, model, lambda each: each(x).square().sum())))  # type: ignore[arg-type]

    def now() -> None:
        if pending:
            for loss in pending.pop(chosen.randrange(len(pending))):
                loss.backward()

    actions: list[tuple[int, Callable[[], Any]]] = [
        (10, lambda: both(plain, model, lambda each: step(each, x))),
        (4, lambda: both(plain, model, lambda each: each.zero_grad())),
        (2, lambda: both(plain, model, lambda each: each.zero_grad(set_to_none=False))),
        (1, lambda: keep(gradients)),
        (1, lambda: keep(lambda each: [gradient[:1] for gradient in gradients(each)])),
        (1, lambda: kept.append(tuple(both(plain, model, differentiated)))),  # type: ignore[arg-type]
        (1, lambda: kept.append(tuple(both(plain, model, output)))),  # type: ignore[arg-type]
        (3, kept.clear),
        (2, later),
        (3, now),
        (1, lambda: model.reset_graphs() if not pending else None),
        (1, lambda: both(plain, model, lambda each: [g.mul_(0.5) for g in gradients(each)])),
    ]

    def differentiated(each: nn.Module) -> list[Tensor]:
        return list(torch.autograd.grad(each(x).square().sum(), list(each.parameters())))

    def output(each: nn.Module) -> list[Tensor]:
        out = each(x)
        out.square().sum().backward()
        return [out.detach()[:1], out]

    for number in range(40):
        torch.manual_seed(1000 * seed + number)
        x = torch.randn(chosen.choice(SIZES), batches(1, device)[0][0].shape[1], device=device)
        chosen.choices([action for _, action in actions], [weight for weight, _ in actions])[0]()
        assert_same(model, plain)
        for expected, actual in kept:
            assert all(map(torch.equal, expected, actual)), number
    assert model.graph_stats.replays > 0


class Two(nn.Module):
    """Has two outputs, each with a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(x)


def test_losses_of_one_output_and_of_both_in_turn_are_eagers(device: torch.device) -> None:
    plain, model = twins(Two, device)
    for number, (x, _) in enumerate(batches(9, device)):
        for each in (plain, model):
            each.zero_grad()
            sum(out.square().sum() for out in each(x)[: 1 if number % 3 == 1 else 2]).backward()
        assert_same(model, plain)
    assert sum(model.graph_stats.eager.values()) <= 2
