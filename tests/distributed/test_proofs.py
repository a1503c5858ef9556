"""Ranks compare replays with eager at the same replays, and give up a graph together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.serve import call_proof
from tests.distributed.launch import run_ranks, values
from tests.distributed.models import SIZES, InPlace, batch, expected


class Scaled(InPlace):
    """The same, times a number in so large an array that no key holds its values."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        scale = torch.ones(2000).numpy()
        self.scale = lambda: scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.scale()[0])


def compare_now_and_then(rank: int, size: int) -> dict[str, Any]:
    costs = []
    call_proof.first_distance = lambda cost, verify: costs.append(cost) or 4  # type: ignore[func-returns-value]
    model = sg.wrap(
        Scaled(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=30), verify=1, progress=False
    )
    compared, different, stats = [], 0, model.graph_stats
    with torch.inference_mode():
        model.capture_graphs(batch(4))
        for turn in range(24):
            if turn == 12 and rank == 1:
                sg.unwrap(model).scale()[0] = 2.0
            rows = 3 + turn % 2
            before = stats.eager[sg.Reason.PROOF]
            y = model(batch(rows))
            different += not torch.allclose(y, expected(rows) * (4 if turn >= 12 and rank == 1 else 2), atol=1e-5)
            compared += [turn] * (stats.eager[sg.Reason.PROOF] - before)
    return {"compared": compared, "different": different, "costs": set(costs), "failures": dict(stats.failures)}


def test_ranks_compare_at_the_same_replays_and_give_up_together_what_differs_on_one() -> None:
    first, second = values(run_ranks(compare_now_and_then, 2))
    assert first["compared"] == second["compared"] == [0, 5, 14, 15]  # padded, and then at the exact size, too
    assert (first["different"], second["different"]) == (0, 2)  # of the replays between a change and its discovery
    assert first["costs"] == second["costs"] == {call_proof._COST_WITH_RANKS}  # no clock, which would differ
    for found in (first, second):
        (text,) = found["failures"].values()
        assert "on rank 1" in text
        assert "equalled eager after 4 replays, and now, after 12, it does not" in text


class Once(nn.Module):
    """Adds up a number over the ranks; on the last one something is done once for each batch size, and noted."""

    def __init__(self, rank: int, size: int, counts: bool) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros((), dtype=torch.int64))
        self.register_buffer("one", torch.ones(1))
        self.does = (self.state.add_ if counts else self.state.fill_) if rank == size - 1 else None
        self.seen: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        if self.does is not None and len(x) not in self.seen:
            self.seen.add(len(x))
            self.does(1)
        ranks = self.one.clone()
        dist.all_reduce(ranks)
        return x * ranks + self.state


def refuse_what_was_noted(rank: int, size: int, counts: bool) -> dict[str, Any]:
    module = Once(rank, size, counts).eval()
    model = sg.wrap(module, capture_sizes=[4, 8], ranks=sg.RankGroup(timeout=30), progress=False)
    compared, different, stats = [], 0, model.graph_stats
    with torch.inference_mode():
        model.capture_graphs(batch(8))
        done = int(module.state)
        for turn in range(8):
            rows = 4 if counts else 5 + rank * (turn % 2)
            done += counts and rank == 1 and turn == 0
            before = stats.eager[sg.Reason.PROOF]
            y = model(batch(rows))
            different += not torch.allclose(y, batch(rows) * 2 + done, atol=1e-5)
            compared += [turn] * (stats.eager[sg.Reason.PROOF] - before)
    return {"compared": compared, "different": different, "replays": stats.replays, "failures": [*stats.failures]}


def test_ranks_refuse_together_what_a_recording_of_one_of_them_noted() -> None:
    failures = ["batch size 8", "batch size 4"]
    for counts in (False, True):
        for found in values(run_ranks(refuse_what_was_noted, 2, counts)):
            assert found == {"compared": [], "different": 0, "replays": 0, "failures": failures}
