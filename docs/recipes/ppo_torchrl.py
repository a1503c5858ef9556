"""PPO of TorchRL: the actor acts by replays, and each training step is a replay. Both take and write TensorDicts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

import simplegraph as sg


# Recipe
def add_graphs(actor: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable]:
    """Put graphs around an actor, for rollouts, and around a whole training step of a loss."""

    def step(batch: TensorDict) -> TensorDict:
        losses = loss(batch)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        optimizer.step()
        return losses.detach()

    return sg.wrap(actor.eval(), capture_sizes=[1, 32]), sg.train_step(step, optimizers=optimizer)


# Comparison
def learned(policy: nn.Module, values: nn.Module) -> tuple[nn.Module, Callable]:
    """Learn from the same seed."""
    inner = TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"])
    keys = {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal, "return_log_prob": True}
    actor, critic = ProbabilisticActor(inner, **keys), ValueOperator(values, in_keys=["observation"])
    loss, device = ClipPPOLoss(actor, critic), next(policy.parameters()).device
    actor, step = add_graphs(actor, loss, torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True))
    for seed in range(16):
        torch.manual_seed(seed)
        with torch.no_grad():
            seen = actor(TensorDict({"observation": torch.randn(32, 3)}, batch_size=[32]).to(device))
        seen["advantage"], seen["value_target"] = torch.randn(2, 32, 1, device=device)
        step(seen)
    return actor, step


def main() -> dict[str, Callable[[], object]]:
    """Compare what was learned, and return a step of each actor, to be timed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2), NormalParamExtractor()).to(device)
    values = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    networks = {"graphs": copy.deepcopy((policy, values)), "plain": (policy, values)}
    actor, step = learned(*networks["graphs"])
    with sg.eager():
        plain, _ = learned(*networks["plain"])
    for found, expected in zip(networks["graphs"], networks["plain"], strict=True):
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
    for graphed in (actor, step):
        print(graphed.graph_report())
        assert graphed.graph_stats.replays >= 5
    seen = TensorDict({"observation": torch.randn(1, 3)}, batch_size=[1]).to(device)

    def act(actor: nn.Module, *, graphs: bool) -> object:
        with torch.no_grad(), contextlib.nullcontext() if graphs else sg.eager():
            return actor(seen)

    return {"plain": lambda: act(plain, graphs=False), "graphs": lambda: act(actor, graphs=True)}


if __name__ == "__main__":
    main()
