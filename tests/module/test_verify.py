"""`verify` compares first replays with eager, so that a wrong answer is an error and not a surprise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.module.compare import EagerComparison, difference, first_difference

WIDTH = 6

pytestmark = pytest.mark.usefixtures("no_grad")


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.function(self, *args, **kwargs)


def verified(device, function, **settings):
    module = Function(function).to(device).eval()
    return sg.wrap(module, **{"capture_sizes": [4, 8], "verify": 2, "progress": False, **settings})


def rows(count, device):
    return torch.randn(count, WIDTH, device=device)


def test_a_right_module_passes_and_the_forward_runs_twice_while_verified(device):
    model = verified(device, lambda m, x: (x @ m.weight, {"rows": x + 1}))
    x = rows(4, device)
    counts = []
    for _ in range(6):
        hidden, extra = model(x)
        torch.testing.assert_close(hidden, x @ model.weight, rtol=1e-4, atol=1e-5)
        assert torch.equal(extra["rows"], x + 1)
        counts.append(model.calls)
    assert counts == [1, 2, 3, 3, 3, 3]  # first call; check; check; nothing but replays
    assert model.graph_stats.replays == 5


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda m, x: x - x.mean(0), "output 0 differs"),
        (lambda m, x: (x, x.amin(0)), "output 1 differs"),
        (lambda m, x: {"ok": x, "order": x[:, 0].argsort()}, "output 1 differs"),
    ],
    ids=["mean", "smallest", "order"],
)
def test_a_module_that_mixes_rows_is_an_error_under_padding(device, function, found):
    model = verified(device, function)
    model.capture_graphs(rows(8, device))
    exact = model(rows(4, device))
    assert exact is not None
    with pytest.raises(sg.VerificationError, match=found) as raised:
        model(rows(3, device).abs() + 1)
    assert "batch size 4" in str(raised.value)
    assert "padding=False" in str(raised.value)


def test_the_first_padded_call_is_compared_too(device):
    model = verified(device, lambda m, x: x - x.mean(0))
    x = torch.randn(3, 4, device=device)
    with torch.no_grad():
        torch.testing.assert_close(model(x), x - x.mean(0))  # as it is: nothing is padded yet
        with pytest.raises(sg.VerificationError, match="warmup of batch size"):
            model(x)


def test_the_advice_in_the_error_helps(device):
    model = verified(device, lambda m, x: x - x.mean(0), padding=False)
    for size in (4, 4, 4, 3, 8, 8, 8, 4, 5):
        x = rows(size, device)
        torch.testing.assert_close(model(x), x - x.mean(0))
    assert model.graph_stats.replays >= 4


def test_python_state_that_is_frozen_is_an_error(device):
    model = verified(device, lambda m, x: x * m.calls)
    x = rows(4, device)
    model(x)
    model(x)  # the capture saw the same count as this call's eager run
    with pytest.raises(sg.VerificationError, match="Python state"):
        model(x)


def test_random_numbers_are_drawn_once_for_both(device):
    model = verified(device, lambda m, x: x + torch.rand_like(x))
    eager = sg.unwrap(model)
    x = rows(4, device)
    for turn in range(5):
        torch.manual_seed(turn)
        actual = [model(x), model(x)]
        torch.manual_seed(turn)
        expected = [eager(x), eager(x)]
        for one, other in zip(actual, expected, strict=True):
            assert torch.equal(one, other)
    assert model.graph_stats.replays > 5


def test_an_input_that_is_written_is_written_once(device):
    def step(m, x, state):
        state.add_(x)
        return state * 2

    model = verified(device, step, capture_sizes=[4])
    state, expected = torch.zeros(4, WIDTH, device=device), torch.zeros(4, WIDTH, device=device)
    for _ in range(6):
        x = rows(4, device)
        expected = expected + x
        torch.testing.assert_close(model(x, state), expected * 2)
        torch.testing.assert_close(state, expected)


def test_nothing_is_compared_when_it_is_off(device):
    model = verified(device, lambda m, x: x - x.mean(0), verify=0)
    model.capture_graphs(rows(8, device))
    calls = model.calls
    model(rows(3, device))
    assert model.calls == calls


def test_the_environment_can_ask_for_it(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_VERIFY", "1")
    model = sg.wrap(Function(lambda m, x: x - x.mean(0)).to(device).eval(), capture_sizes=[4], progress=False)
    model.capture_graphs(rows(4, device))
    with pytest.raises(sg.VerificationError):
        model(rows(3, device))


# The comparison.


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0]),
        ([NAN, 2.0], [NAN, 2.0]),
        ([INF, -INF], [INF, -INF]),
        ([1.0, 1000.0], [1.0005, 1000.0]),
        ([0.0], [-0.0]),
        ([], []),
    ],
)
def test_equal_values_and_rounding_are_no_difference(device, actual, expected):
    assert difference(torch.tensor(actual, device=device), torch.tensor(expected, device=device)) is None


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.1]),
        ([NAN, 2.0], [1.0, 2.0]),
        ([1.0, 2.0], [NAN, 2.0]),
        ([INF, 2.0], [1.0, 2.0]),
        ([INF], [-INF]),
        ([1e-9], [0.0]),
        ([NAN], [INF]),
    ],
)
def test_other_values_are_a_difference(device, actual, expected):
    assert "differs" in difference(torch.tensor(actual, device=device), torch.tensor(expected, device=device))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_integers_are_compared_exactly(device, dtype):
    one = torch.tensor([0, 1, 1], dtype=dtype, device=device)
    assert difference(one, one.clone()) is None
    assert difference(one, one.flip(0)) is not None


def test_large_integers_are_not_rounded_together(device):
    one = torch.tensor([2**53 + 1], device=device)
    assert difference(one, torch.tensor([2**53], device=device)) is not None


def test_complex_values_are_compared(device):
    one = torch.tensor([1 + 2j], device=device)
    assert difference(one, one.clone()) is None
    assert difference(one, one.conj().resolve_conj()) is not None
    assert difference(one, one * (1 + 1e-6)) is None


def test_shape_dtype_kind_and_count_are_compared(device):
    x = torch.zeros(2, 3, device=device)
    assert "shape" in difference(x, x[:1])
    assert "dtype" in difference(x, x.double())
    assert "eager gives" in difference(x, None)
    assert difference("a", "a") is None
    assert difference(3, 4) is not None
    assert first_difference([x, 3], [x, 3]) is None
    assert "output 1" in first_difference([x, 3], [x, 4])
    assert first_difference([x], [x, x]) == "1 values, eager gives 2"


def test_what_was_expected_is_kept_when_its_memory_is_written_again(device):
    x = torch.ones(3, device=device)
    check = EagerComparison("batch size 3", device)
    check.expect([x])
    x.fill_(2.0)
    with pytest.raises(sg.VerificationError, match="batch size 3"):
        check.compare([x])
