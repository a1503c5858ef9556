"""Trains DistributedDataParallel modules: their reductions between ranks, which no graph repeats, are never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import simplegraph
from simplegraph.base.reasons import Reason
from tests.distributed.launch import run_ranks, values


def build(kind: str) -> tuple[nn.Module, Callable[[Tensor, Tensor], Any], list[Any]]:
    """Return a module, a step that trains it between ranks, and what of simplegraph has graphs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graphed: list[Any] = [simplegraph.wrap(module, training=True)] if kind.endswith("around a wrapped module") else []
    replica: Any = DistributedDataParallel(graphed[0] if graphed else module)
    if kind == "wrapped":
        replica = simplegraph.wrap(replica, training=True)
    elif kind == "wrapped around":
        replica = simplegraph.wrap(nn.Sequential(replica, nn.Tanh()), training=True)
    elif kind == "eager around":
        replica = nn.Sequential(replica, nn.Tanh())

    def step(rows: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(replica(rows), labels)
        loss.backward()
        optimizer.step()
        return loss

    if kind.startswith("step"):
        trained = simplegraph.train_step(step, optimizers=optimizer)
        return module, trained, [trained, *graphed]
    return module, step, [replica] if kind.startswith("wrapped") else graphed


def train(rank: int, size: int, kind: str) -> tuple[list[list[float]], list[dict[Any, int]], list[int]]:
    module, step, graphed = build(kind)
    torch.manual_seed(10 + rank)
    weights = []
    for _ in range(7):
        step(torch.randn(8, 4), torch.randint(2, (8,)))
        weights.append(torch.cat([each.detach().flatten() for each in module.parameters()]).tolist())
    stats = [each.graph_stats for each in graphed]
    return weights, [dict(each.eager) for each in stats], [each.replays for each in stats]


def train_both(rank: int, size: int, kind: str, eager: str) -> tuple[Any, Any]:
    return train(rank, size, eager), train(rank, size, kind)


@pytest.mark.parametrize(
    ("kind", "eager"),
    [
        ("step", "eager"),
        ("step around a wrapped module", "eager"),
        ("wrapped", "eager"),
        ("wrapped around", "eager around"),
    ],
)
def test_replicas_train_as_in_eager_and_are_refused_by_name(kind: str, eager: str) -> None:
    for (expected, _, _), (weights, counts, replays) in values(run_ranks(train_both, 2, kind, eager)):
        assert weights == expected
        assert set(counts[0]) == {Reason.FIRST_CALL, Reason.UNTRAINABLE}
        assert replays[0] == 0
        assert all(count > 0 for count in replays[1:])  # the module in it has graphs all the same


def test_a_replica_around_a_wrapped_module_trains_by_graphs() -> None:
    for (expected, _, _), (weights, _, replays) in values(run_ranks(train_both, 2, "around a wrapped module", "eager")):
        for found, eager in zip(weights, expected, strict=True):
            torch.testing.assert_close(found, eager)
        assert replays == [replays[0]]
        assert replays[0] >= 3
