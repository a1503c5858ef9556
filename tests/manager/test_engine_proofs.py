"""An engine that asks for it has a step proven: run eagerly, replayed from where that began, and compared."""

from __future__ import annotations

import pytest
import torch

import simplegraph as sg
from tests.support.unseen_kernel import stand_in_triton

WIDTH = 4

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Engine:
    """Adds each row to its slot of a cache, and returns the slots times a scale."""

    def __init__(self, device, **settings):
        self.manager = sg.CudaGraphManager(device=device, capture_sizes=[2, 4], progress=False, **settings)
        self.hidden = torch.zeros(4, WIDTH, device=device)
        self.slots = torch.arange(4, device=device)
        self.cache = torch.zeros(8, WIDTH, device=device)
        self.scale = 1.0
        self.runs = 0

    def forward(self, mode, descriptor):
        self.runs += 1
        rows = descriptor.num_tokens
        self.cache.index_add_(0, self.slots[:rows], self.hidden[:rows])
        return self.cache[self.slots[:rows]] * self.scale

    def step(self, rows, **options):
        self.hidden[:rows] = torch.randn(rows, WIDTH, device=self.hidden.device)
        return self.manager.run(self.manager.dispatch(rows), self.forward, **options)


def test_a_proven_step_runs_once_and_leaves_what_eager_leaves(device):
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    engine.cache.zero_()
    runs, expected = engine.runs, torch.zeros_like(engine.cache)
    for turn in range(1, 4):
        result = engine.step(4, verify=True, state=[engine.cache])
        expected[:4] += engine.hidden
        assert torch.equal(engine.cache, expected)
        assert torch.equal(result, expected[:4])
        assert engine.runs == runs + turn
    engine.step(4)
    assert engine.runs == runs + 3
    graph = engine.manager.stats.graphs[engine.manager.dispatch(4)[:2]]
    assert (graph.proof, graph.replays) == ("exact", 1)


def test_what_a_kernel_of_triton_writes_in_a_break_is_there_after_a_proof(device, monkeypatch):
    """Torch's dispatcher does not see the write."""
    if device.type == "cuda":
        pytest.skip("tests/attention/test_recurrent.py does it with Triton")
    add = stand_in_triton(monkeypatch)(lambda cache, rows: cache[: len(rows)].add_(rows))

    class WithBreak(Engine):
        def forward(self, mode, descriptor):
            rows = self.hidden[: descriptor.num_tokens] * self.scale
            advance(self, rows)
            return rows * 2

    @sg.eager_break(padded=True)
    def advance(engine, rows):
        add.run(engine.cache, rows)

    engine = WithBreak(device, mode="PIECEWISE", on_capture_failure="raise")
    engine.manager.capture(engine.forward)
    engine.cache.zero_()
    expected = torch.zeros_like(engine.cache)
    for rows in (4, 2, 4):
        engine.step(rows, verify=True, state=[engine.cache])
        expected[:rows] += engine.hidden[:rows]
        assert torch.equal(engine.cache, expected)
    assert {graph.proof for graph in engine.manager.stats.graphs.values()} == {"exact"}


def test_a_frozen_number_is_found_and_that_size_runs_eagerly(device):
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    engine.scale = 3.0
    engine.cache.zero_()
    result = engine.step(4, verify=True, state=[engine.cache])
    assert torch.equal(result, engine.hidden * 3)
    assert torch.equal(engine.cache[:4], engine.hidden)
    assert "does not equal eager" in next(iter(engine.manager.stats.failures.values()))
    engine.cache.zero_()
    assert torch.equal(engine.step(4), engine.hidden * 3)


def test_configured_to_raise_a_difference_is_an_error(device):
    engine = Engine(device, on_capture_failure="raise")
    engine.manager.capture(engine.forward)
    engine.scale = 3.0
    with pytest.raises(sg.VerificationError, match="batch size 4 does not equal eager: output 0 differs"):
        engine.step(4, verify=True, state=[engine.cache])


def test_memory_that_state_does_not_name_is_an_error_and_nothing_is_replayed(device):
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    engine.cache.zero_()
    with pytest.raises(sg.InputError, match=r"state does not name: \(8, 4\)"):
        engine.step(4, verify=True)
    assert torch.equal(engine.cache[:4], engine.hidden)


def test_more_state_than_can_be_copied_is_an_error_before_anything_runs(device, monkeypatch):
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    runs = engine.runs
    monkeypatch.setattr("simplegraph.device.saved_state._LIMIT_BYTES", 16)
    with pytest.raises(sg.InputError, match="state has 128 bytes; at most 16"):
        engine.step(4, verify=True, state=[engine.cache])
    assert engine.runs == runs


def test_a_size_without_a_graph_runs_eagerly_with_nothing_to_prove(device):
    engine = Engine(device)
    assert engine.step(4, verify=True).shape == (4, WIDTH)
    assert engine.runs == 1


def test_an_error_in_the_eager_run_of_a_proof_is_the_callers_and_the_next_call_proves(device):
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    engine.cache.zero_()
    forward = engine.forward

    def fails(mode, descriptor):
        forward(mode, descriptor)
        raise ValueError("not these rows")

    engine.forward = fails
    with pytest.raises(ValueError, match="not these rows"):
        engine.step(4, verify=True, state=[engine.cache])
    assert torch.equal(engine.cache[:4], engine.hidden)  # it ran once, as far as it came
    engine.forward = forward
    assert torch.equal(engine.step(4, verify=True, state=[engine.cache]), engine.cache[:4])
    assert [graph.proof for graph in engine.manager.stats.graphs.values() if graph.size == 4] == ["exact"]


def test_a_replay_that_fails_in_a_proof_is_a_difference(device, monkeypatch):
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    engine.cache.zero_()

    def failing(*args, **kwargs):
        engine.cache.fill_(5)
        raise RuntimeError("the device said no")

    with monkeypatch.context() as patched:
        patched.setattr("simplegraph.manager.table.ProgramTable.replay", failing)
        result = engine.step(4, verify=True, state=[engine.cache])
    assert torch.equal(result, engine.hidden)
    assert torch.equal(engine.cache[:4], engine.hidden)
    assert "fails with RuntimeError: the device said no" in next(iter(engine.manager.stats.failures.values()))


def test_values_that_are_no_number_and_plain_ones_are_compared_as_others(device):
    engine = Engine(device)
    scale, steps = torch.full((), float("nan"), device=device), [7]

    def forward(mode, descriptor):
        return engine.hidden[: descriptor.num_tokens] * scale, steps[0]

    engine.forward = forward
    engine.manager.capture(forward)
    hidden, number = engine.step(4, verify=True)
    assert hidden.isnan().all()
    assert number == 7
    assert [graph.proof for graph in engine.manager.stats.graphs.values() if graph.size == 4] == ["exact"]
    steps[0] = 8
    assert engine.step(4, verify=True)[1] == 8
    assert "output 1 is 7, eager gives 8" in next(iter(engine.manager.stats.failures.values()))
