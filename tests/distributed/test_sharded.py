"""Serves and trains modules whose parameters are spread over ranks: answers are right, a step is refused by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import simplegraph
from simplegraph.base.reasons import Reason
from tests.distributed.launch import run_ranks, values


def sharded() -> tuple[nn.Module, nn.Module]:
    """Return a module, and the same spread over the ranks."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    spread = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    spread.load_state_dict(plain.state_dict())
    return plain, fully_shard(spread, mesh=torch.distributed.init_device_mesh("cpu", (2,)))


def serve(rank: int, size: int) -> tuple[float, dict[Any, int], int]:
    plain, spread = sharded()
    model = simplegraph.wrap(spread.eval(), capture_sizes=[4], progress=False)
    worst = 0.0
    with torch.no_grad():
        for count in range(8):
            if count == 5:  # as an optimizer does, in place
                for weight in [*plain.parameters(), *spread.parameters()]:
                    weight.mul_(2)
            x = torch.randn(4, 4)
            worst = max(worst, float((model(x) - plain(x)).abs().max()))
    return worst, dict(model.graph_stats.eager), model.graph_stats.replays


def train(rank: int, size: int) -> tuple[float, dict[Any, int], int]:
    plain, spread = sharded()
    found = []
    for module in (plain, spread):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor, module: Any = module, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            return loss

        run = step if module is plain else simplegraph.train_step(step, optimizers=optimizer)
        torch.manual_seed(3)
        found.append([run(torch.randn(8, 4), torch.randn(8, 2)).item() for _ in range(5)])
    worst = max(abs(a - b) for a, b in zip(*found, strict=True))
    return worst, dict(run.graph_stats.eager), run.graph_stats.replays


def test_a_module_sharded_by_fsdp_is_served_as_in_eager() -> None:
    for worst, eager, replays in values(run_ranks(serve, 2)):
        assert worst < 1e-5
        assert replays >= 3
        assert set(eager) <= {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF}


def test_a_step_that_trains_a_sharded_module_runs_eagerly_by_name() -> None:
    for worst, eager, replays in values(run_ranks(train, 2)):
        assert worst < 1e-5
        assert (eager, replays) == ({Reason.UNTRAINABLE: 5}, 0)
