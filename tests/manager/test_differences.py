"""Differences of two values: to the bit, beyond rounding, beyond noise."""

from __future__ import annotations

import types

import pytest
import torch

from simplegraph.manager.replay_proof import (
    EXACT,
    OTHER_SIZE,
    Effects,
    ReplayProof,
    by_least_precise,
    first_difference,
    gap,
    leaf_difference,
)

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
    assert leaf_difference(torch.tensor(actual, device=device), torch.tensor(expected, device=device)) is None


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
    assert "differs" in leaf_difference(torch.tensor(actual, device=device), torch.tensor(expected, device=device))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8])
def test_integers_are_compared_exactly(device, dtype):
    one = torch.tensor([0, 1, 1], dtype=dtype, device=device)
    assert leaf_difference(one, one.clone()) is None
    assert leaf_difference(one, one.flip(0)) is not None


def test_large_integers_are_not_rounded_together(device):
    one = torch.tensor([2**53 + 1], device=device)
    assert leaf_difference(one, torch.tensor([2**53], device=device)) is not None


def test_complex_values_are_compared(device):
    one = torch.tensor([1 + 2j], device=device)
    assert leaf_difference(one, one.clone()) is None
    assert leaf_difference(one, one.conj().resolve_conj()) is not None
    assert leaf_difference(one, one * (1 + 1e-6)) is None


def test_shape_dtype_kind_and_count_are_compared(device):
    x = torch.zeros(2, 3, device=device)
    assert "shape" in leaf_difference(x, x[:1])
    assert "dtype" in leaf_difference(x, x.double())
    assert "eager gives" in leaf_difference(x, None)
    assert leaf_difference("a", "a") is None
    assert leaf_difference(3, 4) is not None
    assert first_difference([x, 3], [x, 3]) is None
    assert "output 1" in first_difference([x, 3], [x, 4])
    assert first_difference([x], [x, x]) == "1 values, eager gives 2"


def test_to_the_bit_rounding_is_a_difference_and_nan_equals_itself(device):
    one = torch.tensor([1.0, 1000.0], device=device)
    assert leaf_difference(one, one + torch.tensor([0.0, 1e-4], device=device)) is None
    assert leaf_difference(one, one + torch.tensor([0.0, 1e-4], device=device), tolerance=EXACT) is not None
    assert leaf_difference(one, one.clone(), tolerance=EXACT) is None
    broken = torch.tensor([NAN, 1.0], device=device)
    assert leaf_difference(broken, broken.clone(), tolerance=EXACT) is None


def test_what_two_runs_differ_by_is_allowed_and_no_more(device):
    one = torch.tensor([1.0, 2.0], device=device)
    noise = one + 1e-3
    assert leaf_difference(one, one + 2e-3, tolerance=EXACT, noise=gap(one, noise)[0]) is None
    assert leaf_difference(one, one + 2e-2, tolerance=EXACT, noise=gap(one, noise)[0]) is not None
    assert leaf_difference(one, one + 2e-3, tolerance=EXACT, noise=0.0) is not None


class OneRank:
    """Stands for the ranks of a single process."""

    def any(self, _: str, wants: bool) -> bool:
        return wants


def proof_of_one_output() -> ReplayProof:
    """Make a proof that compares outputs alone."""
    proof = object.__new__(ReplayProof)
    proof._table = types.SimpleNamespace(ranks=OneRank())
    proof._graph = types.SimpleNamespace(counters=types.SimpleNamespace(label="a graph"))
    proof._memory = types.SimpleNamespace(tensors=(), inputs=())
    proof.rounding, proof.exact = OTHER_SIZE, EXACT
    return proof


def outcome(
    replays: list[list[torch.Tensor]], eager: list[torch.Tensor], *, rounded: bool = False
) -> tuple[str | None, int]:
    """Compare the first of some replays with eager; return the difference, and how many more were asked for."""
    runs = iter([Effects(outputs, (), ()) for outputs in replays])
    asked = []
    found = proof_of_one_output().differs_beyond_noise(
        next(runs), Effects(eager, (), ()), lambda: asked.append(1) or next(runs), rounded=rounded
    )
    return found, len(asked)


def test_replays_that_vary_are_repeated_before_a_difference_counts(device):
    large, few = torch.ones(100, device=device), torch.ones(2, device=device)
    varied = [[large + 1e-4 * at, few] for at in range(5)]
    assert outcome(varied, [large, few]) == (None, 0)
    lucky = [[large, few], [large + 1e-4, few], [large, few + 1e-3], [large, few], [large, few]]
    assert outcome(lucky, [large, few + 2e-3]) == (None, 2)
    text, asked = outcome(varied, [large, few + 2e-3])
    assert (asked, str(text).partition(" differs")[0]) == (4, "output 1")


def test_replays_that_are_equal_to_the_bit_are_not_repeated_twice(device):
    one = torch.ones(100, device=device)
    text, asked = outcome([[one]] * 5, [one + 1e-3])
    assert (asked, str(text).partition(" differs")[0]) == (1, "output 0")


def test_rounding_and_noise_are_allowed_together(device):
    """The gradient of a bias before a normalization is nothing but noise, which no rounding of its values covers."""
    large, bias = torch.ones(100, device=device), torch.full((4,), 1e-5, device=device)
    replays = [[large, bias * at] for at in range(1, 6)]
    assert outcome(replays, [large * (1 + 1e-6), -bias], rounded=True)[0] is None
    assert outcome(replays, [large * (1 + 1e-6), -bias])[0] is not None
    assert outcome(replays, [large * (1 + 1e-6), -100 * bias], rounded=True)[0] is not None


def test_another_size_may_round_more_but_integers_stay(device):
    one = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, device=device)
    assert leaf_difference(one, one * 1.06) is not None
    assert leaf_difference(one, one * 1.06, tolerance=OTHER_SIZE) is None
    assert leaf_difference(one, one * 1.5, tolerance=OTHER_SIZE) is not None
    count = torch.tensor([3], device=device)
    assert leaf_difference(count, count + 1, tolerance=OTHER_SIZE) is not None


def test_large_tensors_are_compared_whole(device):
    one = torch.zeros((1 << 24) + 3, dtype=torch.uint8, device=device)
    other = one.clone()
    other[-1] = 1
    assert leaf_difference(one, other) is not None
    assert leaf_difference(one, one.clone(), tolerance=EXACT) is None


def test_differences_are_named(device):
    x = torch.zeros(2, device=device)
    assert first_difference([x, x], [x, x + 1], names=["hidden", "cache"]).startswith("cache differs")


def test_what_was_computed_in_bfloat16_is_as_precise_as_that_wherever_it_is_stored(device):
    one = torch.tensor([1.0, 1.03], device=device)
    other = torch.ones(2, device=device)
    assert leaf_difference(one, other, tolerance=by_least_precise(OTHER_SIZE, {torch.float32, torch.int64})) is not None
    assert leaf_difference(one, other, tolerance=by_least_precise(OTHER_SIZE, {torch.float32, torch.bfloat16})) is None
    assert leaf_difference(one, other, tolerance=by_least_precise(EXACT, {torch.bfloat16})) is not None
    wide = by_least_precise(OTHER_SIZE, {torch.float64})
    assert wide[torch.bfloat16] == OTHER_SIZE[torch.bfloat16]
    assert wide[torch.float64] == OTHER_SIZE[torch.float64]
