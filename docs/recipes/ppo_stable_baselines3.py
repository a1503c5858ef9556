"""PPO of stable-baselines3: acting, values, and forward and backward of the losses are replays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor, nn

import simplegraph as sg


# Recipe
class Evaluation(nn.Module):
    """What the losses call at each minibatch; as a module, it can have graphs for its backward."""

    def __init__(self, policy: ActorCriticPolicy) -> None:
        super().__init__()
        self.policy, self.evaluate = policy, type(policy).evaluate_actions

    def forward(self, observations: Tensor, actions: Tensor) -> Any:
        return self.evaluate(self.policy, observations, actions)


def add_graphs(policy: ActorCriticPolicy) -> None:
    """Give a policy graphs, before `learn`."""
    torch.distributions.Distribution.set_default_validate_args(False)  # it reads every value back
    last = policy.action_dist  # it keeps the last call's distribution, which a replay cannot set: copies do
    last.proba_distribution = lambda *args: type(last).proba_distribution(copy.copy(last), *args)
    evaluation = sg.wrap(Evaluation(policy), training=True)
    policy.evaluate_actions = lambda observations, actions: evaluation(observations, actions)
    policy.forward, policy.predict_values = sg.wrap(policy.forward), sg.wrap(policy.predict_values)


# Comparison
def learned(*, graphs: bool) -> PPO:
    """Learn from the same seed, with or without graphs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ppo = PPO("MlpPolicy", "Pendulum-v1", n_steps=128, batch_size=32, n_epochs=2, seed=0, device=device)
    if graphs:
        add_graphs(ppo.policy)
    return ppo.learn(512)


def main() -> dict[str, Callable[[], object]]:
    """Compare what was learned, and return a step of each policy, to be timed."""
    plain, graphed = learned(graphs=False), learned(graphs=True)
    torch.testing.assert_close(graphed.policy.state_dict(), plain.policy.state_dict(), rtol=1e-3, atol=1e-4)
    print(graphed.policy.forward.graph_report())
    assert graphed.policy.forward.graph_stats.replays > 500
    observations = torch.randn(1, 3, device=plain.device)
    with torch.no_grad():
        graphed.policy(observations)

    def act(ppo: PPO) -> object:
        with torch.no_grad():
            return ppo.policy(observations)

    return {"plain": lambda: act(plain), "graphs": lambda: act(graphed)}


if __name__ == "__main__":
    main()
