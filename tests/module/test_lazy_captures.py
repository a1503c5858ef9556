"""Sizes that are captured as they come may read, write, keep and return other things than those before them.

Each capture is therefore observed. One that is taken to be like another's may miss each of these.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close, reasons

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
WIDTH, FEW = 6, 4
SIZES = [8, 4]
KEPT: dict[str, Any] = {}  # by no module


class Grows(nn.Module):
    """A layer, with something more for small batches."""

    def __init__(self, more: Callable[[Grows, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.tables: dict[int, Tensor] = {99: torch.zeros(WIDTH)}
        self.more = more

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return self.more(self, x, y) if len(x) <= FEW else y

    def table(self, rows: int) -> Tensor:
        """Return the table for so many rows, made at the first call."""
        if rows not in self.tables:
            self.tables[rows] = torch.full((WIDTH,), float(rows), device=self.linear.weight.device)
        return self.tables[rows]


def served(more: Callable[..., Any], device: torch.device, **settings: Any) -> Any:
    """Wrap the module, and let a graph serve large batches."""
    model = sg.wrap(Grows(more).to(device).eval(), capture_sizes=SIZES, progress=False, **settings)
    called(model, device, 8, 3)
    return model


def called(model: Any, device: torch.device, rows: int, times: int) -> None:
    """Call a model, each time with other numbers, and compare."""
    for _ in range(times):
        x = torch.randn(rows, WIDTH, device=device)
        answer = model(x)
        with sg.eager():
            close(answer, model(x))


def added(self: Grows, x: Tensor, y: Tensor) -> Tensor:
    return y + self.tables[FEW] if FEW in self.tables else y


def returned(self: Grows, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y + self.table(len(x)), self.table(len(x))


def whole(self: Grows, x: Tensor, y: Tensor) -> Tensor:
    return y + self.tables[FEW] if len(x) == FEW else y


def as_parameter(self: Grows, x: Tensor, y: Tensor) -> Tensor:
    if len(x) not in self.tables:
        made = torch.full((WIDTH,), float(len(x)), device=x.device)
        self.tables[len(x)] = nn.Parameter(made, requires_grad=False)
    return y + self.tables[len(x)]


@pytest.mark.parametrize(
    ("more", "rows", "verify"),
    [*((more, FEW, verify) for more in (added, returned, as_parameter) for verify in (0, 1)), (whole, 3, 1)],
)
@pytest.mark.parametrize("lives", [True, False], ids=["the old one lives", "the old one is freed"])
def test_a_table_that_small_batches_read_may_be_replaced(
    more: Callable[..., Any], rows: int, verify: int, lives: bool, device: torch.device
) -> None:
    model = served(more, device, verify=verify)
    if more is whole:  # fewer rows, which are padded, read none
        model.tables[FEW] = torch.ones(WIDTH, device=device)
    called(model, device, rows, 1)
    if more is added:  # between the eager run and the capture
        model.tables[FEW] = torch.ones(WIDTH, device=device)
    called(model, device, rows, 2)
    called(model, device, FEW, 3)
    kept = copy.copy(model.tables) if lives else None
    other = torch.full((WIDTH,), 50.0, device=device)
    model.tables[FEW] = nn.Parameter(other, requires_grad=False) if more is as_parameter else other
    gc.collect()
    called(model, device, FEW, 3)
    assert kept is None or FEW in kept


def test_what_only_the_padded_size_writes_is_not_written_for_fewer_rows(device: torch.device) -> None:
    KEPT["count"] = torch.zeros(WIDTH, device=device)

    def counting(self: Grows, x: Tensor, y: Tensor) -> Tensor:
        if len(x) == FEW:
            KEPT["count"].add_(1)
        return y

    model = served(counting, device)
    KEPT["count"].zero_()
    called(model, device, 3, 3)
    assert KEPT["count"].tolist() == [0.0] * WIDTH
    assert reasons(model)["padding_shows"]


def test_a_constant_that_small_batches_return_is_the_callers_own(device: torch.device) -> None:
    def with_loss(self: Grows, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, torch.tensor(0.0)

    model = served(with_loss, device)
    for _ in range(4):
        _, loss = model(torch.randn(FEW, WIDTH, device=device))
        loss += 1
        assert loss.item() == 1.0


def test_a_global_that_keeps_an_answer_of_small_batches_keeps_eagers(device: torch.device) -> None:
    double = sg.eager_break(lambda y: y * 2)

    def keeping(self: Grows, x: Tensor, y: Tensor) -> Tensor:
        KEPT["last"] = answer = double(y) + 1
        return answer

    model = served(keeping, device, mode="PIECEWISE")
    for _ in range(5):
        answer = model(torch.randn(FEW, WIDTH, device=device))
        close(KEPT["last"], answer)


def test_a_forward_may_swap_what_it_made(device: torch.device) -> None:
    def swapping(self: Grows, x: Tensor, y: Tensor) -> Tensor:
        other = x * 3
        torch.utils.swap_tensors(y, other)
        return y

    called(served(swapping, device), device, FEW, 4)


@pytest.mark.parametrize("rows", [[5, 5, 3, 5, 5], [5, 5, 5, 3, 5]])
def test_a_graph_of_exactly_its_size_serves_calls_once_another_size_came(device: torch.device, rows: list[int]) -> None:
    """It was captured while batch dimensions were a guess. A padded one would cost a warmup and a capture more."""
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[1, 2, 4, 8], progress=False)
    for count in rows:
        called(model, device, count, 1)
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays == 2
