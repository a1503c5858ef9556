"""Calls that are refused again and again run eagerly without a look at the module, which is looked at again in time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.call.remembered_refusals import _MAX_CALLS_UNCHECKED, _SURE
from simplegraph.guard.plain_state import HolderReader


class Counting(nn.Module):
    """Counts its runs while it is told to, which no graph can do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs, self.counts, self.scale = 0, True, 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.runs += 1
        return self.linear(x) * self.scale


def refused(device: torch.device, calls: int) -> tuple[Counting, nn.Module, Tensor]:
    """Call a module that counts its runs."""
    plain = Counting().to(device).eval()
    wrapped = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(calls):
        wrapped(x)
    return plain, wrapped, x


def test_looks_become_rare(device: torch.device, no_grad: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped, x = refused(device, _SURE + 200)
    reads = []
    read = HolderReader.read_changes
    monkeypatch.setattr(HolderReader, "read_changes", lambda *call: reads.append(1) or read(*call))
    for _ in range(2 * (_MAX_CALLS_UNCHECKED + 1)):
        torch.testing.assert_close(wrapped(x), plain.linear(x), rtol=0, atol=0)
    assert len(reads) <= 12
    assert plain.runs == _SURE + 200 + 2 * (_MAX_CALLS_UNCHECKED + 1)  # every call is a run, and one more learnt of it
    assert wrapped.graph_stats.eager[Reason.CAPTURE_FAILED] == plain.runs - 1


def test_what_ends_the_refusal_is_noticed_after_the_rest(device: torch.device, no_grad: None) -> None:
    plain, wrapped, x = refused(device, 300)
    plain.counts = False
    for _ in range(_MAX_CALLS_UNCHECKED + 8):
        torch.testing.assert_close(wrapped(x), plain.linear(x))
    assert wrapped.graph_stats.replays > 0
    replays = wrapped.graph_stats.replays
    plain.scale = 2.0  # a graph serves again, so each call reads
    torch.testing.assert_close(wrapped(x), plain.linear(x) * 2)
    plain.scale = 1.0
    torch.testing.assert_close(wrapped(x), plain.linear(x))
    assert wrapped.graph_stats.replays > replays
    plain.counts = True
    for count in range(1, 5):
        runs = plain.runs
        wrapped(x)
        assert plain.runs == runs + 1, count


def test_reset_graphs_ends_a_rest_at_once_as_the_warning_says(device: torch.device, no_grad: None) -> None:
    plain, wrapped, x = refused(device, 300)
    plain.counts = False
    wrapped.reset_graphs()
    for _ in range(4):
        torch.testing.assert_close(wrapped(x), plain.linear(x))
    assert wrapped.graph_stats.replays > 0


def test_a_value_that_changes_during_a_rest_is_right_then_and_in_graphs_after_it(
    device: torch.device, no_grad: None
) -> None:
    plain, wrapped, x = refused(device, 300)
    for scale in (2.0, 3.0, 4.0):
        plain.scale = scale
        for _ in range(10):
            torch.testing.assert_close(wrapped(x), plain.linear(x) * scale)
    plain.counts = False
    for step in range(3 * _MAX_CALLS_UNCHECKED):
        plain.scale = 2.0 + step % 2
        torch.testing.assert_close(wrapped(x), plain.linear(x) * plain.scale)
    assert wrapped.graph_stats.replays > 0


class Reads(nn.Module):
    """Reads two rows on the host, and reads an attribute by a name that stands nowhere in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.which = nn.Linear(4, 4), ["a", "dd"]

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 2 and x.sum().item() > 1e9:
            return x
        return self.linear(x) + getattr(self, "".join(self.which), 0.0)


def test_what_other_code_sets_during_a_rest_is_no_change_by_runs(device: torch.device, no_grad: None) -> None:
    plain = Reads().to(device).eval()
    wrapped = sg.wrap(plain, capture_sizes=[2, 4], padding=False, progress=False)
    two, four = torch.randn(2, 4, device=device), torch.randn(4, 4, device=device)
    for _ in range(300):
        wrapped(two)
    for value in (0.0, 1.0, 2.0):
        if value:
            plain.add = value
        for _ in range(3):
            torch.testing.assert_close(wrapped(two), plain.linear(two) + value)
        for _ in range(5):
            torch.testing.assert_close(wrapped(four), plain.linear(four) + value)
        for _ in range(100):
            wrapped(two)
    assert wrapped.graph_stats.replays > 0
    del plain.add
    wrapped(two)
    torch.testing.assert_close(wrapped(four), plain.linear(four))


def test_calls_of_other_kinds_are_looked_at_during_a_rest(device: torch.device, no_grad: None) -> None:
    plain, wrapped, x = refused(device, 300)
    other = torch.randn(3, 4, device=device)
    torch.testing.assert_close(wrapped(other), plain.linear(other))
    torch.testing.assert_close(wrapped(x.tolist() and x.t().contiguous().t()), plain.linear(x))
    plain.train()
    wrapped(x)
    assert wrapped.graph_stats.eager[Reason.TRAINING] == 1
    plain.eval()
    with pytest.raises(TypeError):
        wrapped(x, 1)
    torch.testing.assert_close(wrapped(x), plain.linear(x))


class Scales(nn.Module):
    """Scales its answer by a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


REFUSED = {
    "rows above every size": (Reason.BATCH_TOO_LARGE, 9, torch.no_grad),
    "training mode": (Reason.TRAINING, 2, torch.no_grad),
    "gradients": (Reason.GRAD, 2, torch.enable_grad),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_calls_that_are_refused_before_they_are_read_rest_too_while_graphs_serve_others(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason, rows, mode = REFUSED[kind]
    plain = Scales().to(device).eval()
    wrapped = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    small, refused = torch.randn(2, 4, device=device), torch.randn(rows, 4, device=device)
    reads = []
    read = HolderReader.read_changes
    monkeypatch.setattr(HolderReader, "read_changes", lambda *call: reads.append(1) or read(*call))
    replays = 0
    for scale in (1.0, 2.0, 1.0):
        with torch.no_grad():
            for _ in range(6):
                torch.testing.assert_close(wrapped(small), plain.linear(small) * plain.scale)
        assert wrapped.graph_stats.replays > replays
        replays = wrapped.graph_stats.replays
        plain.train(kind == "training mode")
        with mode():
            for _ in range(_SURE + 200):
                wrapped(refused)
            reads.clear()
            plain.scale = scale
            for _ in range(2 * (_MAX_CALLS_UNCHECKED + 1)):
                torch.testing.assert_close(wrapped(refused), plain.linear(refused) * scale)
        assert not reads
        plain.eval()
        assert wrapped.graph_stats.replays == replays
    assert reason in wrapped.graph_stats.eager
    assert set(wrapped.graph_stats.eager) <= {reason, Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF}


def test_parameters_that_are_frozen_during_a_rest_are_served_by_graphs_at_once(device: torch.device) -> None:
    plain = Scales().to(device).eval()
    wrapped = sg.wrap(plain, capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(300):
        wrapped(x)
    plain.requires_grad_(False)
    for _ in range(4):
        torch.testing.assert_close(wrapped(x), plain(x))
    assert wrapped.graph_stats.replays > 0


class Registers(nn.Module):
    """Fills a dict by batch size, and reads it at a key that others choose."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.name = nn.Linear(4, 4), dict[Any, float](), "scale"

    def forward(self, x: Tensor) -> Tensor:
        self.table.setdefault(len(x), 0.0)
        return self.linear(x) * self.table.get(self.name, 1.0)


@pytest.mark.parametrize("calls", [0, 1, 60])
def test_what_other_code_adds_during_a_rest_to_a_dict_that_runs_fill_counts(
    calls: int, device: torch.device, no_grad: None
) -> None:
    plain = Registers().to(device).eval()
    wrapped = sg.wrap(plain, capture_sizes=[2, 4], progress=False)
    small, large = torch.randn(2, 4, device=device), torch.randn(9, 4, device=device)
    for _ in range(5):
        wrapped(small)
    for _ in range(_SURE + 8):
        wrapped(large)
    replays = wrapped.graph_stats.replays
    torch.testing.assert_close(wrapped(small), plain.linear(small))
    assert wrapped.graph_stats.replays == replays + 1  # what runs fill during a rest counts for nothing
    for _ in range(_SURE + 8):
        wrapped(large)
    plain.table["scale"] = 3.0
    for _ in range(calls):
        wrapped(large)
    for _ in range(4):
        torch.testing.assert_close(wrapped(small), plain.linear(small) * 3.0)
    assert wrapped.graph_stats.replays > replays + 1


@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_first_layer_that_is_replaced_by_a_frozen_one_is_served_and_the_old_one_ends(
    kind: str, device: torch.device
) -> None:
    plain = Scales().to(device).eval()
    target: Any = plain if kind == "module" else lambda x: plain.linear(x)
    wrapped: Any = sg.wrap(target, capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(_SURE + 8):
        assert wrapped(x).requires_grad
    old = weakref.ref(plain.linear.weight)
    kept = plain.linear
    plain.linear = nn.Linear(4, 4, device=device).requires_grad_(False)
    for _ in range(_MAX_CALLS_UNCHECKED + 8):
        torch.testing.assert_close(wrapped(x), plain.linear(x))
    assert wrapped.graph_stats.replays > 0
    del kept
    assert old() is None


def test_a_refusal_keeps_no_weights_alive(device: torch.device) -> None:
    plain = Counting().to(device).eval().requires_grad_(False)
    wrapped = sg.wrap(plain, capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(_SURE):
        wrapped(x)
    old = weakref.ref(plain.linear.weight)
    plain.linear = nn.Linear(4, 4, device=device).requires_grad_(False)
    torch.testing.assert_close(wrapped(x), plain.linear(x))
    assert old() is None
