"""Eager breaks: a marked function runs between graph segments, at every replay, and the numbers are eager's."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import ConfigError
from simplegraph.program.program import Program
from tests.graph.breaks.models import Attention, Calls, Model, check_equal, doubled, graphs, piecewise, stack

pytestmark = pytest.mark.usefixtures("inference_mode")


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
def test_a_break_splits_the_graph_and_the_numbers_are_eagers(device: torch.device, capture: str) -> None:
    module = Model()
    model = piecewise(module, device, capture=capture)
    if capture == "upfront":
        model.capture_graphs(torch.randn(3, 4, device=device))
    check_equal(model, module, device)
    assert [(graph.segments, graph.breaks) for graph in graphs(model)] == [(2, 1), (2, 1)]
    assert model.graph_stats.failures == {}


def test_at_every_replay_the_break_runs_and_the_rest_of_python_does_not(device: torch.device) -> None:
    model = piecewise(Model(), device)
    model.capture_graphs(torch.randn(4, 4, device=device))
    Calls.breaks = Calls.forwards = 0
    for _ in range(5):
        model(torch.randn(4, 4, device=device))
    assert (Calls.breaks, Calls.forwards) == (5, 0)


def test_in_full_mode_a_break_is_part_of_the_one_segment(device: torch.device) -> None:
    module = Model()
    model = piecewise(module, device, mode="FULL")
    check_equal(model, module, device)
    assert {(graph.segments, graph.breaks) for graph in graphs(model)} == {(1, 0)}


def test_outside_a_capture_a_break_is_a_plain_call() -> None:
    assert doubled(torch.ones(1)).item() == 2
    assert doubled.__name__ == "doubled"


def test_marking_twice_does_no_harm() -> None:
    assert sg.eager_break(doubled) is doubled


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0

    @sg.eager_break
    def attend(self, x: Tensor, *, bias: Tensor) -> Tensor:
        return x * self.scale + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.linear(x), bias=self.linear.bias).relu()


def test_methods_break_and_read_their_object_at_every_replay(device: torch.device) -> None:
    module = Method()
    model = piecewise(module, device)
    check_equal(model, module, device)
    module.scale = 5.0
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 1


# What cannot be marked.


async def later(x: Tensor) -> Tensor:
    return x


def stream(x: Tensor) -> Iterator[Tensor]:
    yield x


class Deferred:
    async def __call__(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (later, "async"),
        (stream, "generator"),
        (functools.partial(later), "async"),
        (Deferred(), "async"),
        (Model, "the class Model"),
        (nn.Linear(1, 1), "break_at"),
        (staticmethod(len), "put @staticmethod above it"),
        (3, "expected a function"),
    ],
)
def test_what_cannot_break_is_refused_when_it_is_marked(target: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sg.eager_break(target)


def test_a_pattern_that_matches_nothing_is_told_ones_that_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    with pytest.raises(sg.ConfigError, match=r"no submodule is named 'nope'; Linear has no submodules\.$"):
        sg.break_at(nn.Linear(2, 2), "nope")
    with pytest.raises(sg.ConfigError, match=r"no submodule is named '\*\.1'; there are, among others, \*\.0, 0, 1\."):
        sg.break_at(model, "*.1")
    assert sg.break_at(model, "*.0") == ["1.0"]


def test_break_at_breaks_at_the_named_modules(device: torch.device) -> None:
    module = stack()
    reference = copy.deepcopy(module)
    assert sg.break_at(module, "*.attn") == ["0.attn", "1.attn", "2.attn"]
    model = piecewise(module, device)
    check_equal(model, reference.to(device).eval(), device)
    assert graphs(model)[0].breaks == 3
    assert "Attention x 3" in str(model.graph_report())
    assert isinstance(module[0].attn, Attention)
    assert module.state_dict().keys() == reference.state_dict().keys()


def test_break_at_finds_a_shared_module_by_each_of_its_names(device: torch.device) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + 1) * 2

    module = Shared().eval().to(device)
    twin = copy.deepcopy(module)
    assert sg.break_at(module, "second") == ["second"]
    model = piecewise(module, device)
    check_equal(model, twin, device)
    assert graphs(model)[0].breaks == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_keep_their_breaks(device: torch.device, copied: Callable[[Any], Any]) -> None:
    module = stack(1)
    sg.break_at(module, "*.attn")
    twin = copied(module)
    model = piecewise(twin, device)
    check_equal(model, twin, device)
    assert graphs(model)[0].breaks == 1
    torch.testing.assert_close(twin[0].attn.proj.weight, module[0].attn.proj.weight.to(device))
    assert twin[0].attn.proj.weight is not module[0].attn.proj.weight


def test_hooks_of_a_module_that_breaks_run_at_every_replay(device: torch.device) -> None:
    module = stack(1)
    sg.break_at(module, "0.attn")
    seen: list[tuple[int, ...]] = []
    module[0].attn.register_forward_hook(lambda _, args, out: seen.append(tuple(args[0].shape)))
    model = piecewise(module, device)
    model.capture_graphs(torch.randn(4, 4, device=device))
    seen.clear()
    for _ in range(3):
        model(torch.randn(4, 4, device=device))
    assert seen == [(4, 4)] * 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((stack(), "*.atn"), r"'\*\.atn'.*\*\.attn"),
        ((stack(),), "at least one"),
        ((stack(), 3), "at least one"),
        ((3, "*"), "torch.nn.Module"),
    ],
)
def test_break_at_says_what_is_wrong(args: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sg.break_at(*args)


@pytest.mark.parametrize("replays", [0, 1, 2, 3])
def test_a_program_is_gone_with_its_last_reference(device: torch.device, replays: int) -> None:
    model = piecewise(Model(), device, capture_sizes=[4])
    model.capture_graphs(torch.randn(4, 4, device=device))
    (graph,) = model.graph_manager.table.graphs.values()
    captured = graph.program
    program = Program(captured.device, captured.steps, captured.outputs, captured.spec)  # with no other reference
    for _ in range(replays):
        program.replay()
    gone = weakref.ref(program)
    gc.disable()
    try:
        del program
        assert gone() is None
    finally:
        gc.enable()


# The report.


def test_the_report_names_each_break_and_its_share(device: torch.device) -> None:
    model = piecewise(Model(), device, capture_sizes=[4])
    model.capture_graphs(torch.randn(4, 4, device=device))
    assert "doubled x 1 (timed at the second replay)" in str(model.graph_report())
    for _ in range(3):
        model(torch.randn(4, 4, device=device))
    text = str(model.graph_report())
    assert "doubled x 1" in text
    assert "%" in text
    (graph,) = model.graph_report().to_dict()["graphs"]
    assert [(step["kind"], step["name"]) for step in graph["steps"]] == [
        ("segment", ""),
        ("break", "doubled"),
        ("segment", ""),
    ]
    assert all(step["ms"] > 0 for step in graph["steps"])
    assert graph["steps"][0]["nodes"] == 1
