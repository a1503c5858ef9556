"""PPO of TorchRL: the networks inside the actor and the critic are replays, in rollouts and in the loss."""

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
def actor_and_critic(policy: nn.Module, values: nn.Module) -> tuple[ProbabilisticActor, ValueOperator]:
    """Make TensorDict modules around graphs of plain modules: what writes to a TensorDict runs eagerly."""
    policy, values = (sg.wrap(module.eval(), training=True) for module in (policy, values))
    inner = TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"])
    keys = {"in_keys": ["loc", "scale"], "distribution_class": TanhNormal, "return_log_prob": True}
    return ProbabilisticActor(inner, **keys), ValueOperator(values, in_keys=["observation"])


# Comparison
def learned(policy: nn.Module, values: nn.Module) -> tuple[ProbabilisticActor, ValueOperator]:
    """Learn from the same seed."""
    actor, critic = actor_and_critic(policy, values)
    loss, device = ClipPPOLoss(actor, critic), next(policy.parameters()).device
    optimizer = torch.optim.Adam([*policy.parameters(), *values.parameters()], lr=1e-3)
    for seed in range(8):
        torch.manual_seed(seed)
        with torch.no_grad():
            seen = actor(TensorDict({"observation": torch.randn(32, 3)}, batch_size=[32]).to(device))
        seen["advantage"], seen["value_target"] = torch.randn(2, 32, 1, device=device)
        losses = loss(seen)
        sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return actor, critic


def main() -> dict[str, Callable[[], object]]:
    """Compare what was learned, and return a step of each actor, to be timed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2), NormalParamExtractor()).to(device)
    values = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    networks = {"graphs": copy.deepcopy((policy, values)), "plain": (policy, values)}
    actor, critic = learned(*networks["graphs"])
    with sg.eager():
        plain, _ = learned(*networks["plain"])
    for found, expected in zip(networks["graphs"], networks["plain"], strict=True):
        torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-4)
    for wrapped in (actor.module[0].module, critic.module):
        print(wrapped.graph_report())
        assert wrapped.graph_stats.replays >= 10
    seen = TensorDict({"observation": torch.randn(1, 3)}, batch_size=[1]).to(device)

    def act(actor: ProbabilisticActor, *, graphs: bool) -> object:
        with torch.no_grad(), contextlib.nullcontext() if graphs else sg.eager():
            return actor(seen)

    return {"plain": lambda: act(plain, graphs=False), "graphs": lambda: act(actor, graphs=True)}


if __name__ == "__main__":
    main()
