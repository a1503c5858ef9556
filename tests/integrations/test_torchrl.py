"""TorchRL's actors and losses with their TensorDicts: rollouts replay, and so do training steps of PPO and SAC."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytest.importorskip("tensordict", minversion="0.15", reason="needs tensordict 0.15")
pytest.importorskip("torchrl", reason="needs torchrl")
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, SACLoss, SoftUpdate

pytestmark = pytest.mark.proofs
OBSERVED, ACTIONS, ROWS = 3, 2, 16


def layers(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs)]


class QValue(nn.Module):
    """Values an observation and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(OBSERVED + ACTIONS, 1))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.layers(torch.cat([observation, action], -1))


def actor_of(device: torch.device) -> ProbabilisticActor:
    torch.manual_seed(0)
    network = nn.Sequential(*layers(OBSERVED, 2 * ACTIONS), NormalParamExtractor()).to(device)
    inner = TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(inner, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True)


def critic_of(device: torch.device) -> ValueOperator:
    torch.manual_seed(1)
    return ValueOperator(nn.Sequential(*layers(OBSERVED, 1)).to(device), in_keys=["observation"])


def observed(seed: int, device: torch.device, rows: int = ROWS) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    return TensorDict({"observation": torch.randn(rows, OBSERVED, generator=generator).to(device)}, [rows])


def transitions(seed: int, device: torch.device) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(ROWS, 1, generator=generator).to(device)
    done = torch.zeros(ROWS, 1, dtype=torch.bool, device=device)
    entries = {"reward": reward, "done": done, "terminated": done.clone()}
    action = (torch.rand(ROWS, ACTIONS, generator=generator) * 1.8 - 0.9).to(device)
    after = observed(seed + 100, device).update(entries)
    return observed(seed, device).update({"action": action, "next": after})


def assert_same(found: TensorDict, expected: TensorDict) -> None:
    assert type(found) is type(expected)
    assert found.batch_size == expected.batch_size
    assert list(found.keys(True)) == list(expected.keys(True))
    for key in expected.keys(True, True):
        torch.testing.assert_close(found[key], expected[key])


def both(seed: int, *functions: Callable[[], Any]) -> list[Any]:
    """Call functions with the same random numbers."""
    answers = []
    for function in functions:
        torch.manual_seed(seed)
        answers.append(function())
    return answers


@pytest.mark.usefixtures("no_grad")
def test_an_actor_acts_by_replays_and_explores_as_it_is_told(device: torch.device) -> None:
    plain = actor_of(device).eval()
    model = sg.wrap(plain, capture_sizes=[1, ROWS], progress=False)
    for seed in range(12):
        way = (ExplorationType.DETERMINISTIC, ExplorationType.RANDOM)[seed % 2]
        passed, expected = observed(seed, device), observed(seed, device)
        with set_exploration_type(way):
            found, answer = both(seed, lambda td=passed: model(td), lambda td=expected: plain(td))
        assert found is passed
        assert answer is expected
        assert_same(found, answer)
    assert model.graph_stats.replays >= 6


def ppo(device: torch.device) -> nn.Module:
    return ClipPPOLoss(actor_of(device), critic_of(device))


def sac(device: torch.device) -> nn.Module:
    torch.manual_seed(2)
    value = ValueOperator(QValue().to(device), ["observation", "action"], ["state_action_value"])
    loss = SACLoss(actor_of(device), value, target_entropy=-float(ACTIONS))
    loss.make_value_estimator()
    return loss.to(device)


def sampled(seed: int, device: torch.device) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    advantage = torch.randn(2, ROWS, 1, generator=generator).to(device)
    with torch.no_grad():
        torch.manual_seed(seed)
        td = actor_of(device)(observed(seed, device))
    return td.update({"advantage": advantage[0], "value_target": advantage[1]})


LOSSES: dict[str, tuple[Callable[[torch.device], Any], Callable[[int, torch.device], TensorDict], list[str]]] = {
    "ClipPPOLoss": (ppo, sampled, ["loss_objective", "loss_critic", "loss_entropy"]),
    "SACLoss": (sac, transitions, ["loss_actor", "loss_qvalue", "loss_alpha"]),
}


def step_of(loss: Any, optimizer: Any, names: Iterable[str]) -> Callable[[TensorDict], TensorDict]:
    def step(td: TensorDict) -> TensorDict:
        losses = loss(td)
        optimizer.zero_grad()
        sum(losses[name] for name in names).backward()
        optimizer.step()
        return losses.detach()

    return step


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_a_step_trains_as_eager_and_writes_to_its_batch(name: str, device: torch.device) -> None:
    make, batch, names = LOSSES[name]
    losses = [make(device) for _ in range(2)]
    losses[1].load_state_dict(losses[0].state_dict())
    optimizers = [torch.optim.Adam(loss.parameters(), lr=1e-3, fused=True) for loss in losses]
    updates = [SoftUpdate(loss, tau=0.1) for loss in losses] if name == "SACLoss" else []
    model = sg.train_step(step_of(losses[0], optimizers[0], names), optimizers=optimizers[0])
    plain = step_of(losses[1], optimizers[1], names)
    for seed in range(8):
        passed, expected = batch(seed, device), batch(seed, device)
        found, answer = both(seed, lambda td=passed: model(td), lambda td=expected: plain(td))
        assert_same(found, answer)
        assert_same(passed, expected)
        for update in updates:
            update.step()
    torch.testing.assert_close(losses[0].state_dict(), losses[1].state_dict())
    assert model.graph_stats.replays >= 4
