"""Programs without graphs: ``python -m bench.advise.programs NAME`` runs one, as its author would have written it."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import simplegraph as sg
from bench.tools.measure import Figures, device_of, synchronize
from simplegraph.doctor.trials import validating
from simplegraph.doctor.turns import Way, in_turns

Call = Callable[[], object]
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
SIDE, ROWS = {"cuda": 8192, "cpu": 64}, {"cuda": 4096, "cpu": 8}  # of the products that keep a GPU busy
_PLAIN, _FOLLOWED = 2, 10  # first calls, which are not timed: those of the advice teach, capture and prove
_SECONDS = 2.0  # after which no turn of timed calls begins


class Policy(nn.Module):
    """Small transformer that chooses one of 8 actions for each of (batch, 32) observations."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 128), nn.Linear(128, 8)
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, observation: Tensor) -> Tensor:
        hidden = self.layers(self.embed(observation.unflatten(-1, (8, 4))))
        action: Tensor = self.head(hidden.mean(1)).argmax(-1)
        return action


class Agent(nn.Module):
    """An actor and a critic, as CleanRL's PPO has them."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.actor = (
            nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out))
            for out in (1, 2)
        )

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def _learn(agent: Agent, optimizer: Any, x: Tensor, action: Tensor, before: Tensor, value: Tensor) -> Tensor:
    """Take one step of PPO, without clipping the ratio; return the loss."""
    _, logprob, entropy, now = agent.get_action_and_value(x, action)
    loss = -(logprob - before).exp().mean() + F.mse_loss(now.flatten(), value) - 0.01 * entropy.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
    optimizer.step()
    return loss


class Program(abc.ABC):
    """A program: its loop, one call as its author makes it, and the same after its first advice was followed."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device

    @abc.abstractmethod
    def loop(self) -> None:
        """Run the program."""

    @abc.abstractmethod
    def plain(self, called: str) -> Call:
        """Return one call of what an advice names."""

    @abc.abstractmethod
    def followed(self, called: str) -> Call:
        """Return the same call after the advice was followed."""


class Evaluation(Program):
    """Evaluates a policy: each action is waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.model: nn.Module = Policy().to(device).eval()
        self.inputs = torch.randn(1, 32, device=device)

    def loop(self) -> None:
        model = self.model
        with torch.inference_mode():
            for _ in range(100):
                self.inputs.add_(model(self.inputs).float().mean().item() * 0.1)

    @torch.inference_mode()
    def _run(self, model: Any) -> object:
        return model(self.inputs)

    def plain(self, called: str) -> Call:
        return functools.partial(self._run, self.model)

    def followed(self, called: str) -> Call:
        sizes = [self.inputs.shape[0]]
        return functools.partial(self._run, sg.wrap(self.model, capture_sizes=sizes, progress=False))


class Busy(Evaluation):
    """Runs products that keep the GPU busy."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        side, rows = SIDE[device.type], ROWS[device.type]
        self.model = nn.Sequential(*(nn.Linear(side, side) for _ in range(4))).to(device, torch.bfloat16).eval()
        self.inputs = torch.randn(rows, side, device=device, dtype=torch.bfloat16)


class Training(Program):
    """Trains an agent, as CleanRL's PPO does: short rollouts without gradients, updates in minibatches."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.agent = Agent().to(device)
        self.observation = torch.randn(4, 4, device=device)

    def loop(self) -> None:
        agent, observation = self.agent, self.observation
        optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
        for _ in range(4):
            stored = []
            for _ in range(32):
                with torch.no_grad():
                    action, logprob, _, value = agent.get_action_and_value(observation)
                stored.append((observation, action, logprob, value.flatten()))
                observation = torch.tanh(observation + 0.1 * action[:, None])
            batch = [torch.cat(part) for part in zip(*stored, strict=True)]
            for rows in torch.randperm(128, device=self.device).split(32):
                _learn(agent, optimizer, *(part[rows] for part in batch))

    def _update(self, *, graphed: bool) -> Callable[..., Tensor]:
        agent = Agent().to(self.device)
        fused = True if graphed and self.device.type == "cpu" else None  # as it is told: a GPU needs no such setting
        optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5, fused=fused)

        def update(*batch: Tensor) -> Tensor:
            return _learn(agent, optimizer, *batch)

        return sg.train_step(update, optimizers=optimizer, progress=False) if graphed else update

    def _batch(self) -> tuple[Tensor, ...]:
        observation, zeros = torch.randn(32, 4, device=self.device), torch.zeros(32, device=self.device)
        return observation, zeros.long(), zeros, zeros

    @torch.no_grad()
    def _act(self, act: Any) -> object:
        return act(self.observation)

    def plain(self, called: str) -> Call:
        if called == "optimizer.step":
            return functools.partial(self._update(graphed=False), *self._batch())
        return functools.partial(self._act, self.agent.get_action_and_value)

    def followed(self, called: str) -> Call:
        if called == "optimizer.step":
            return functools.partial(self._update(graphed=True), *self._batch())
        return functools.partial(self._act, sg.wrap(self.agent.get_action_and_value, capture_sizes=[4], progress=False))


class Generation(Program):
    """Generates from a small model of transformers, prompt by prompt."""

    def __init__(self, device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__(device)
        config = LlamaConfig(vocab_size=512, num_key_value_heads=8, max_position_embeddings=256, **SMALL)
        self.model = LlamaForCausalLM(config).to(device).eval()
        self.prompt = torch.randint(3, 512, (1, 16), device=device)
        self.tokens = 48 if device.type == "cuda" else 8

    def _generate(self, model: Any) -> object:
        return model.generate(self.prompt, max_new_tokens=self.tokens, min_new_tokens=self.tokens, do_sample=False)

    def loop(self) -> None:
        for _ in range(6):
            self._generate(self.model)

    def plain(self, called: str) -> Call:
        return functools.partial(self._generate, self.model)

    def followed(self, called: str) -> Call:
        import copy

        from simplegraph.integrations.transformers import graph_generation

        model = copy.deepcopy(self.model)
        self.graphs = graph_generation(model, max_batch_size=1, max_length=64 * (1 + (16 + self.tokens) // 64))
        return functools.partial(self._generate, model)


PROGRAMS: dict[str, type[Program]] = {
    "evaluation": Evaluation,
    "ppo": Training,
    "generation": Generation,
    "busy": Busy,
}


def gain(plain: Call, followed: Call, device: torch.device, rounds: int) -> Figures:
    """Measure both calls in turns, each waited for, in ms; distributions check their arguments in plain calls alone."""
    ways = Way(plain, functools.partial(validating, True)), Way(followed, functools.partial(validating, False))
    for way, first in zip(ways, (_PLAIN, _FOLLOWED), strict=True):
        with way.context():
            for _ in range(first):
                way.call()
    plain_ms, followed_ms = in_turns(*ways, lambda: synchronize(device), calls=rounds, seconds=_SECONDS)
    return {"plain_ms": plain_ms, "followed_ms": followed_ms}


def follow(name: str, called: str, device: torch.device, rounds: int) -> Figures:
    """Measure a program's call as its author makes it, and after the advice was followed, in ms."""
    program = PROGRAMS[name](device)
    return gain(program.plain(called), program.followed(called), device, rounds)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](device_of()).loop()
