"""Tensor parallel models, and what every rank is to answer."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device

WAIT = 1.5  # seconds that ranks wait for each other, where one never comes
BOUND = 15.0  # seconds within which every rank must have its error then
SIZES = [2, 4]
WIDTH, INNER = 16, 32


class InPlace(nn.Module):
    """A tensor parallel MLP: columns of the first weight, rows of the second, one all-reduce."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        whole = whole_mlp()
        part = slice(rank * INNER // size, (rank + 1) * INNER // size)
        self.up = nn.Parameter(whole[0].weight.data[part].clone(), requires_grad=False)
        self.down = nn.Parameter(whole[2].weight.data[:, part].clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        dist.all_reduce(y)
        return y * 2


def whole_mlp() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.ReLU(), nn.Linear(INNER, WIDTH, bias=False))


def batch(rows: int) -> Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH).sin()


def expected(rows: int) -> Tensor:
    with torch.no_grad():
        return whole_mlp()(batch(rows))


class FailsOnOneRank(InPlace):
    """Cannot be captured on rank 1 at two rows, and says so before its collective."""

    def __init__(self, rank: int, size: int, error: type[Exception] = ValueError) -> None:
        super().__init__(rank, size)
        self.rank, self.error = rank, error

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 1 and len(x) == 2 and graph_device("cpu").is_capturing():
            raise self.error("no graph of two rows here")
        return super().forward(x)


def timed_error(call: Any) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began


def capture_with(rank: int, size: int, what: str) -> tuple[str, str, float]:
    fails = what in ("raises", "dies in a capture")
    module = FailsOnOneRank(rank, size, sg.InputError) if fails else InPlace(rank, size)
    ranks = sg.RankGroup(timeout=WAIT)
    settings: dict[str, Any] = {"capture_sizes": SIZES, "progress": rank == 0}
    late = rank == size - 1
    if what == "other settings" and late:
        settings["capture_sizes"] = [2, 8]
    if what == "dies" and late:
        os._exit(1)
    if what == "holds the store and dies" and rank == 0:
        time.sleep(WAIT / 2)  # until the others wait for it
        os._exit(1)
    if what == "dies in a capture" and late:
        module.error = end_process  # type: ignore[union-attr]
    if what == "is late" and late:
        time.sleep(2 * WAIT)
    model = sg.wrap(module.eval(), ranks=ranks, **settings)

    with torch.inference_mode():
        return timed_error(lambda: model.capture_graphs(batch(3)))


def end_process(*args: Any) -> Any:
    os._exit(1)
