"""Random modules with up to 40 eager breaks: always eager's answer, state, random numbers and exceptions."""

from __future__ import annotations

import collections
import copy
import random

import pytest
import torch

import simplegraph as sg
from tests.graph.breaks.random_net import (
    CALLS,
    EXPECTED,
    FORMS,
    LARGEST,
    SIZES,
    WIDTH,
    Churn,
    Fatal,
    Net,
    Trouble,
    random_steps,
    same,
)


class Twins:
    """A net with graphs and one without; every call of both must do the same."""

    def __init__(self, device, steps, form="dict", **settings):
        self.net = Net(steps, form).to(device).eval()
        self.twin = copy.deepcopy(self.net)
        fixed = {"mode": "PIECEWISE", "progress": False}
        settings = fixed | settings
        self.model = sg.wrap(self.net, **settings)
        self.device = device
        self.calls = 0
        self.kept = collections.deque(maxlen=5)

    def capture(self, x):
        """All sizes; the runs this takes are seen by the net alone."""
        self.model.capture_graphs(x)
        self.twin.load_state_dict(self.net.state_dict())
        self.twin.scratch.copy_(self.net.scratch)

    def outcome(self, net, x, mode):
        """Return a call's result or exception, and the random numbers drawn after it."""
        torch.manual_seed(self.calls)
        with mode():
            try:
                result = net(x)
            except (Trouble, Fatal, sg.CaptureError) as error:
                result = error
        return result, torch.rand(3, device=x.device)

    def call(self, rng, churn, rows, *, trouble=None, stumble=None, modes=(torch.no_grad, torch.inference_mode)):
        """Call both with the same; what the one with graphs gave."""
        self.calls += 1
        x = torch.randn(rows, WIDTH, device=self.device)
        inputs, scale, mode = x.clone(), rng.uniform(0.1, 2.0), rng.choice(modes)
        self.net.world.begin(scale, trouble, stumble)
        actual, drawn = self.outcome(self.model, x, mode)
        churn()
        if isinstance(actual, sg.CaptureError):
            assert actual.__cause__ is stumble[1]
            assert not self.net.world.log
        else:
            self.twin.world.begin(scale, trouble, stumble if stumble and actual is stumble[1] else None)
            expected, drawn_by_twin = self.outcome(self.twin, inputs, mode)
            self.compare(actual, expected, rows)
            same(drawn, drawn_by_twin)
            if not isinstance(expected, BaseException):
                same(x, inputs)  # what is written into an argument
                self.keep(actual)
        same(dict(self.net.state_dict()), dict(self.twin.state_dict()))
        return actual

    def compare(self, actual, expected, rows):
        assert self.net.world.log == self.twin.world.log
        same([seen[:rows] for seen in self.net.world.seen], self.twin.world.seen)
        if isinstance(expected, BaseException):
            assert actual is expected
            assert actual.__cause__ is None
        else:
            same(actual, expected)

    def keep(self, result):
        """Outputs handed out as the caller's own stay as they were."""
        for kept, then in self.kept:
            same(kept, then)
        if self.model._graph_runner.config.outputs == "clone" and isinstance(result, torch.Tensor):
            self.kept.append((result, result.clone()))

    def check_replayed(self, expected_reasons=EXPECTED):
        stats = self.model.graph_stats
        assert stats.replays > 0 or sg.Reason.SIZE_NOT_CAPTURED in stats.eager
        if any(name == "gathered" for name, *_ in self.net.steps):  # is passed a list that stays, so it is not cut
            expected_reasons = expected_reasons | {sg.Reason.PADDING_SHOWS}
        assert set(stats.eager) <= expected_reasons
        assert {graph.breaks for graph in stats.graphs.values()} == {self.net.num_breaks}
        assert stats.recaptures == 0


def random_trouble(rng, num_breaks):
    return rng.randrange(2 * num_breaks + 1), rng.choice([Trouble, Fatal])("from a break")


@pytest.mark.parametrize("seed", range(60))
def test_any_breaks_equal_eager(device, seed):
    rng = random.Random(seed)
    num_breaks = rng.choice([0, 1, 2, 3, 5, 8, 12, 20, 30, 38]) if seed else 38
    settings = {"outputs": rng.choice(["clone", "static"]), "capture_sizes": rng.choice(SIZES)}
    modes = [rng.choice([torch.no_grad, torch.inference_mode])]
    upfront = rng.random() < 0.5
    settings |= {"capture": "upfront"} if upfront else {}
    twins = Twins(device, random_steps(rng, num_breaks), rng.choice(sorted(FORMS)), **settings)
    if upfront:
        with modes[0]():  # a mode that a forward sets is seen as its own where it is not the caller's anyway
            twins.capture(torch.randn(rng.randint(1, LARGEST), WIDTH, device=device))
    churn = Churn(rng, device)
    for _ in range(CALLS):
        trouble = random_trouble(rng, num_breaks) if rng.random() < 0.25 else None
        twins.call(rng, churn, rng.randint(1, LARGEST), trouble=trouble, modes=modes)
    twins.check_replayed({sg.Reason.SIZE_NOT_CAPTURED} if upfront else EXPECTED)
    assert twins.model.graph_stats.failures == {}
