"""Engines with mixed batches: uniform decode on full graphs, everything else on piecewise ones, sizes for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import (
    AttentionCGSupport,
    BatchDescriptor,
    CaptureError,
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    Reason,
)

FULL, PIECEWISE, NONE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE, CudaGraphMode.NONE
WIDTH = 4


pytestmark = pytest.mark.usefixtures("no_grad")


class Engine:
    """Tokens of several requests; each request's attention is the mean of its own tokens, read from live metadata."""

    def __init__(self, device: torch.device, *, breaks: bool = True, **settings: Any) -> None:
        settings = {"capture_sizes": [2, 4, 8], "max_num_seqs": 4, "progress": False} | settings
        self.manager = CudaGraphManager(device=device, **settings)
        self.linear = nn.Linear(WIDTH, WIDTH).to(device)
        self.x = torch.zeros(16, WIDTH, device=device)
        self.lengths: list[int] = []
        self.eager_lengths: list[list[int]] = []
        self.attend = sg.eager_break(self._attend) if breaks else self._attend

    def _attend(self, hidden: Tensor, out: Tensor) -> None:
        """One token a request in decode; otherwise by the lengths that the step has now."""
        if all(length == 1 for length in self.lengths):
            out.copy_(hidden)
            return
        start = 0
        for length in self.lengths:
            out[start : start + length] = hidden[start : start + length].mean(0)
            start += length

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        hidden = self.linear(self.x[: descriptor.num_tokens])
        self.attend(hidden, out := torch.zeros_like(hidden))
        return self.linear(out)

    def step(self, *lengths: int) -> CudaGraphMode:
        """One step of requests with these query lengths, checked against eager; how it was run."""
        tokens = sum(lengths)
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        batch = self.manager.dispatch(tokens, len(lengths), uniform)
        self.lengths = list(lengths)
        self.x.fill_(float("nan"))
        self.x[:tokens] = torch.randn(tokens, WIDTH, device=self.x.device)
        self.x[tokens : batch.descriptor.num_tokens] = 0
        output = self.manager.run(batch, self.forward)[:tokens].clone()
        torch.testing.assert_close(output, self.forward(NONE, BatchDescriptor(tokens))[:tokens])
        return batch.mode


def captured(engine: Engine) -> Engine:
    engine.lengths = [1]
    summary = engine.manager.capture(engine.forward)
    assert summary.failed == {}
    return engine


def test_decode_gets_full_graphs_and_mixed_batches_piecewise_ones(device: torch.device) -> None:
    engine = captured(Engine(device, mode="FULL_AND_PIECEWISE"))
    assert engine.step(1, 1, 1) is FULL
    assert engine.step(3, 1, 1) is PIECEWISE
    assert engine.step(2, 2) is PIECEWISE, "uniform, but of another query length"
    assert engine.step(1, 5, 2) is PIECEWISE
    assert engine.step(1) is FULL
    assert engine.step(9) is NONE
    counted = {(graph.mode, graph.size): graph.breaks for graph in engine.manager.stats.graphs.values()}
    assert counted == {("FULL", 2): 0, ("FULL", 4): 0, ("PIECEWISE", 2): 1, ("PIECEWISE", 4): 1, ("PIECEWISE", 8): 1}
    assert engine.manager.stats.replays == 5


def test_decode_only_runs_mixed_batches_eagerly_and_says_why(device: torch.device) -> None:
    engine = captured(Engine(device, mode="FULL_DECODE_ONLY"))
    assert engine.step(1, 1) is FULL
    assert engine.step(2, 1) is NONE
    assert engine.manager.stats.eager[Reason.MIXED_BATCH] == 1


def test_uniform_decode_of_several_tokens_has_its_own_graphs(device: torch.device) -> None:
    engine = Engine(device, mode="FULL_AND_PIECEWISE", uniform_query_len=2, support=AttentionCGSupport.UNIFORM_BATCH)
    engine.lengths = [2]
    engine.manager.capture(engine.forward)
    assert engine.manager.dispatch(4, 2, 2).mode is FULL
    assert engine.manager.dispatch(4, 4, 1).mode is PIECEWISE


def test_sizes_can_be_given_for_each_mode(device: torch.device) -> None:
    engine = captured(Engine(device, mode="FULL_AND_PIECEWISE", decode_capture_sizes=[1, 3, 4], capture_sizes=[8, 16]))
    sizes = {
        mode: sorted(d.num_tokens for m, d in engine.manager.descriptors() if m is mode) for mode in (FULL, PIECEWISE)
    }
    assert sizes == {FULL: [1, 3, 4], PIECEWISE: [8, 16]}
    assert engine.step(1, 1, 1) is FULL
    assert engine.step(2, 1) is PIECEWISE


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decode_capture_sizes": [2, 3], "uniform_query_len": 2}, "3; expected multiples of uniform_query_len=2"),
        ({"decode_capture_sizes": []}, r"decode_capture_sizes is \[\]; expected a list of whole numbers"),
        ({"decode_capture_sizes": [9], "max_num_tokens": 8}, "above max_num_tokens=8"),
        ({"decode_capture_sizes": "abc"}, "decode_capture_sizes is 'abc'"),
    ],
)
def test_decode_sizes_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sg.CudaGraphConfig(**settings)


@pytest.mark.parametrize("support", [AttentionCGSupport.NEVER, AttentionCGSupport.UNIFORM_BATCH])
def test_attention_that_cannot_be_in_a_full_graph_is_not_captured_where_it_is_no_break(
    device: torch.device, support: AttentionCGSupport
) -> None:
    engine = Engine(device, breaks=False, mode="PIECEWISE", support=support)
    engine.lengths = [1]
    summary = engine.manager.capture(engine.forward)
    assert summary.captured == 0
    assert all("met no eager break" in str(error) for error in summary.failed.values())
    strict = Engine(device, breaks=False, mode="PIECEWISE", support=support, on_capture_failure="raise")
    strict.lengths = [1]
    with pytest.raises(CaptureError, match=f"{support.name}.*(?s:.)*@simplegraph.eager_break"):
        strict.manager.capture(strict.forward)


def test_attention_that_can_never_be_in_a_graph_runs_between_segments(device: torch.device) -> None:
    engine = captured(Engine(device, mode="FULL_AND_PIECEWISE", support=AttentionCGSupport.NEVER))
    assert engine.manager.dispatcher.mode is PIECEWISE
    assert engine.step(1, 1, 1) is PIECEWISE
    assert engine.step(3, 1, 1) is PIECEWISE


def test_a_break_that_returns_a_tensor_warms_up_every_size_once(device: torch.device) -> None:
    engine = Engine(device, mode="PIECEWISE")
    runs: list[tuple[int, bool]] = []

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        runs.append((descriptor.num_tokens, engine.manager.device.is_capturing()))
        return sg.eager_break(torch.neg)(engine.linear(engine.x[: descriptor.num_tokens])) * 2

    assert engine.manager.capture(forward).failed == {}
    assert runs == [(8, False), (8, True), (4, False), (4, True), (2, False), (2, True)]
    batch = engine.manager.dispatch(3)
    torch.testing.assert_close(engine.manager.run(batch, forward), engine.linear(engine.x[:4]) * -2)


def test_breaks_that_return_nothing_are_warmed_up_on_the_largest_size_alone(device: torch.device) -> None:
    engine = Engine(device, mode="PIECEWISE")
    engine.lengths = [1]
    runs: list[tuple[int, bool]] = []

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        runs.append((descriptor.num_tokens, engine.manager.device.is_capturing()))
        return engine.forward(mode, descriptor)

    engine.manager.capture(forward)
    assert runs == [(8, False), (8, True), (4, True), (2, True)]


def test_described_calls_of_a_wrapped_module_take_the_graph_of_their_kind(device: torch.device) -> None:
    double = sg.eager_break(lambda x: x * 2)

    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return double(x + 1) + 1

    module = Doubling()
    model = sg.wrap(module.eval(), mode="FULL_AND_PIECEWISE", capture_sizes=[4], progress=False)
    for _ in range(4):
        x = torch.randn(4, WIDTH, device=device)
        with sg.describe(num_reqs=4, uniform_query_len=1):
            torch.testing.assert_close(model(x), module(x))
        torch.testing.assert_close(model(x), module(x))
    counted = {graph.mode: (graph.breaks, graph.replays > 0) for graph in model.graph_stats.graphs.values()}
    assert counted == {"FULL": (0, True), "PIECEWISE": (1, True)}
