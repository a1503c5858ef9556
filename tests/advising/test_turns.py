"""Calls with and without a graph are timed in turns: a host that changes its speed does not change the gain."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Distribution

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.doctor import trials, turns
from simplegraph.doctor.advise import Advisor
from simplegraph.doctor.turns import Way, in_turns
from simplegraph.integrations.advice import advisor
from simplegraph.manager.stats import on_eager

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="trials of the emulator; tests/gpu has times")


class Host:
    """A clock on which calls take what they are told to, times what the host's speed makes of it at that moment."""

    def __init__(self, slowness: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.slowness = 0.0, slowness

    def perf_counter(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * self.slowness(self.now)

    def way(self, *seconds: float) -> tuple[list[float], Way]:
        """Return a call that takes these times, the last one from then on, and the list of its starts."""
        starts: list[float] = []

        def call() -> None:
            starts.append(self.now)
            self.spend(seconds[min(len(starts), len(seconds)) - 1])

        return starts, Way(call)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=host.perf_counter))
    return host


@pytest.mark.parametrize("seconds", [0.31, 0.17, 0.7])
def test_a_host_that_is_half_as_fast_at_times_does_not_change_the_gain(seconds: float, host: Host) -> None:
    host.slowness = lambda now: 1.0 + int(now / seconds) % 2
    eager, graph = in_turns(host.way(2e-3)[1], host.way(5e-4)[1], lambda: None)
    assert eager / graph == pytest.approx(4.0, rel=0.01)


def test_the_wait_for_the_result_counts(host: Host) -> None:
    eager, graph = in_turns(host.way(2e-3)[1], host.way(5e-4)[1], lambda: host.spend(1e-3))
    assert (eager, graph) == pytest.approx((3.0, 1.5))


def test_a_call_after_the_other_way_is_not_timed(host: Host) -> None:
    last: list[str] = []

    def way(name: str, seconds: float) -> Way:
        def call() -> None:
            host.spend(seconds if last == [name] else 5 * seconds)
            last[:] = [name]

        return Way(call)

    assert in_turns(way("eager", 2e-3), way("graph", 5e-4), lambda: None) == pytest.approx((2.0, 0.5))


def test_a_context_is_around_each_block_of_calls_and_not_timed(host: Host) -> None:
    entered: list[bool] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        host.spend(0.1)
        entered.append(True)
        yield
        entered.pop()
        host.spend(0.1)

    first = Way(lambda: host.spend(2e-3 if entered else 1.0), context)
    second = Way(lambda: host.spend(1.0 if entered else 5e-4))
    assert in_turns(first, second, lambda: None) == pytest.approx((2.0, 0.5))


def test_slow_calls_are_made_three_times(host: Host) -> None:
    eager, graph = host.way(9.0), host.way(8.0)
    assert in_turns(eager[1], graph[1], lambda: None) == pytest.approx((9e3, 8e3))
    assert (len(eager[0]), len(graph[0])) == (3, 3)


def test_no_turn_begins_after_a_second_or_after_as_many_calls_as_were_asked_for(host: Host) -> None:
    eager, graph = host.way(2e-3), host.way(5e-4)
    in_turns(eager[1], graph[1], lambda: None)
    assert 1.0 <= host.now < 1.025  # a turn takes 0.0225
    assert len(eager[0]) == len(graph[0])
    eager, graph = host.way(2e-3), host.way(5e-4)
    in_turns(eager[1], graph[1], lambda: None, calls=20)
    assert (len(eager[0]), len(graph[0])) == (23, 23)  # three blocks, the first call of each not timed


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def act(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action)


class Timed:
    """Trials that take a CPU for a GPU: what they time."""

    def __init__(self) -> None:
        self.eager = self.served = 0  # timed calls
        self.not_served: list[Reason] = []  # by a graph, of the calls that should be
        self.checked: set[tuple[bool, bool]] = set()  # if distributions check in eager and in served calls

    def in_turns(self, eager: Way, graphed: Way, wait: Callable[[], object]) -> tuple[float, float]:
        checked: list[bool] = []

        def plain() -> None:
            eager.call()
            self.eager += 1
            checked[:] = [Distribution._validate_args]

        def served() -> None:
            graphed.call()
            self.served += 1
            self.checked.add((checked[0], Distribution._validate_args))

        undo = on_eager(lambda name, reason, detail: self.not_served.append(reason))
        try:
            in_turns(Way(plain, eager.context), Way(served, graphed.context), wait, calls=20)
        finally:
            undo()
        return 8.0, 2.0


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    timed, clock = Timed(), itertools.count(step=1e-3)  # on which each call takes a millisecond
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(Distribution, "_validate_args", True)
    monkeypatch.setattr(trials, "on_gpu", lambda things: True)
    monkeypatch.setattr(trials, "gpu_ms", lambda call, eager_ms: 1.0)
    monkeypatch.setattr(trials, "waited_ms", lambda call: 9.0)
    monkeypatch.setattr(trials, "in_turns", timed.in_turns)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return timed


def _told(watching: Advisor) -> list[tuple[Any, ...]]:
    found = [one.trial for one in watching.ranking() if one.trial is not None]
    return [(trial.problem, trial.eager_ms, trial.graph_ms, trial.gain) for trial in found]


IN_TURNS, APART = [("", 8.0, 2.0, 4.0)], [("", 9.0, 9.0, 1.0)]


def test_a_graph_serves_each_call_between_eager_ones(timed: Timed) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).eval()
    with advisor(sg) as watching, torch.no_grad():
        for _ in range(24):
            model(torch.ones(2, 4))
    assert _told(watching) == IN_TURNS
    assert timed.served == timed.eager == 23
    assert timed.not_served == []


def test_eager_calls_check_arguments_of_distributions_and_those_of_a_graph_do_not(timed: Timed) -> None:
    agent = Agent()
    with advisor(sg) as watching, torch.no_grad():
        for _ in range(24):
            agent.act(torch.ones(2, 4))
    assert _told(watching) == IN_TURNS
    assert timed.checked == {(True, False)}
    assert timed.not_served == []
    assert Distribution._validate_args


def _train(optimizer: type[Any], **settings: Any) -> list[float]:
    torch.manual_seed(0)
    agent = Agent()
    adam = optimizer(agent.parameters(), lr=0.1, **settings)
    for _ in range(12):
        adam.zero_grad()
        agent.act(torch.ones(2, 4), torch.zeros(2))[1].sum().neg().backward()
        adam.step()
    return [parameter.sum().item() for parameter in agent.parameters()]


def test_a_graph_serves_each_training_step_between_eager_ones(timed: Timed) -> None:
    plain = _train(torch.optim.Adam)
    with advisor(sg) as watching:
        assert _train(torch.optim.Adam) == plain
    assert _told(watching) == IN_TURNS
    assert timed.checked == {(True, False)}
    assert timed.served == timed.eager == 23
    assert timed.not_served == []


def test_steps_whose_parameters_would_become_infinite_without_the_programs_loss_are_tried(timed: Timed) -> None:
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=1e38)
    with advisor(sg) as watching:
        for _ in range(12):
            optimizer.zero_grad()
            (0 * agent.act(torch.ones(2, 4), torch.zeros(2))[1].sum()).backward()
            optimizer.step()
    assert _told(watching) == IN_TURNS


def test_large_training_steps_are_copied_once_and_timed_apart(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_TRAINED", 16)
    with advisor(sg) as watching:
        _train(torch.optim.Adam, fused=True)
    assert _told(watching) == APART
    assert timed.eager == timed.served == 0


def test_graphs_of_a_models_forward_and_backward_serve_between_eager_steps(timed: Timed) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.RAdam(net.parameters())
    with advisor(sg) as watching:
        for _ in range(12):
            optimizer.zero_grad()
            net(torch.ones(6, 4)).pow(2).mean().backward()
            optimizer.step()
    assert _told(watching) == IN_TURNS
    assert timed.served == timed.eager == 23
    assert timed.not_served == []


def test_generations_with_graphs_take_turns_with_those_of_a_model_without(timed: Timed) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    with advisor(sg) as watching:
        for _ in range(5):
            model.generate(torch.full((1, 5), 7), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert _told(watching) == IN_TURNS
    assert timed.served == timed.eager == 23
    assert timed.not_served == []
