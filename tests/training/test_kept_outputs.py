"""Outputs that a graph made are eager's as long as anyone has them, and whatever is written to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.models import WIDTH, assert_same, batches, mlp, twins

Use = Callable[[Tensor], Any]


def step(model: nn.Module, x: Tensor, use: Use = Tensor.clone) -> Any:
    """Do a step; return what `use` makes of the output after the backward."""
    model.zero_grad()
    torch.manual_seed(0)
    out = model(x)
    out.square().sum().backward()
    return use(out)


def eager_calls(model: Any) -> dict[str, int]:
    return {reason.value: count for reason, count in model.graph_stats.eager.items()}


@pytest.mark.parametrize("first", [0, 3], ids=["from the first call on", "later"])
@pytest.mark.parametrize(
    "use",
    [lambda out: out, lambda out: out.view(-1)[:2], Tensor.detach, Tensor.untyped_storage],
    ids=["the tensor", "a view", "another tensor", "the storage"],
)
def test_an_output_that_is_kept_stays_eagers(device: torch.device, use: Use, first: int) -> None:
    plain, model = twins(mlp, device)
    kept: list[tuple[Any, Any]] = []
    for number, (x, _) in enumerate(batches(8, device)):
        if number < first:
            step(plain, x), step(model, x)
            continue
        kept.append((step(plain, x, use), step(model, x, use)))
        assert_same(model, plain)
        for expected, actual in kept:
            assert expected.tolist() == actual.tolist()
    assert eager_calls(model) == {"first_call": 1}
    assert model.graph_stats.replays == 14


def test_an_output_may_be_written_to(device: torch.device) -> None:
    plain, model = twins(mlp, device)
    for x, _ in batches(5, device):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(0)
            each(x).mul_(2).square().sum().backward()
        assert_same(model, plain)
    assert eager_calls(model) == {"first_call": 1}


def test_an_output_that_its_backward_reads_is_a_copy(device: torch.device) -> None:
    """Written to, in eager it is an error."""
    plain, model = twins(lambda: nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh()), device)
    for number, (x, _) in enumerate(batches(5, device)):
        model.zero_grad()
        expected, out = step(plain, x, Tensor.detach), model(x)
        loss = (out * expected.detach() * 2).sum()  # its gradient is that of the square
        if number > 1:
            out.detach().zero_()
        loss.backward()
        assert_same(model, plain)
        del out, loss
    assert model.graph_stats.replays == 8


class Transposed(nn.Module):
    """Has a weight whose gradient has to be laid out otherwise than it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH).t())
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale) @ self.weight


def test_a_backward_does_not_write_to_the_output(device: torch.device) -> None:
    plain, model = twins(Transposed, device)
    for x, _ in batches(5, device):
        assert torch.equal(step(model, x), step(plain, x))
        assert_same(model, plain)
    assert eager_calls(model) == {"first_call": 1}


class Views(nn.Module):
    """Returns two views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(x)
        return out[:, :2], out[:, 1:]


def test_outputs_of_one_memory_are_copies(device: torch.device) -> None:
    _, model = twins(Views, device)
    for x, _ in batches(3, device):
        one, other = model(x)
        (one.sum() + other.sum()).backward()
        del one, other
    assert model.graph_stats.replays == 4
    one, other = model(x)
    before = other.detach().clone()
    one.detach().zero_()
    assert torch.equal(other, before)


def test_an_output_outlives_the_graphs(device: torch.device) -> None:
    plain, model = twins(mlp, device)
    for x, _ in batches(3, device):
        step(plain, x), step(model, x)
    expected, out = step(plain, x), step(model, x, lambda out: out)
    model.reset_graphs()
    for other, _ in batches(4, device):
        step(model, other)
    del model
    assert torch.equal(out, expected)


def test_graphs_serve_again_after_all_were_flushed(device: torch.device) -> None:
    """Outputs and gradients of graphs that are gone hold no graphs for ever."""
    plain, model = twins(mlp, device, max_signatures=1, on_too_many_signatures="flush")
    for rows in (4, 5, 4, 5):
        for x, _ in batches(4, device, rows):
            kept = step(model, x, lambda out: out), step(plain, x, lambda out: out)
            assert torch.equal(*kept)
            assert_same(model, plain)
    assert eager_calls(model) == {"first_call": 4}
