"""Compares an arm's outputs with eager's, on new tokens of the text."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from bench.arms.base import Arm, Setup, fill, padded_size, rows
from bench.models.workload import Batch
from bench.tools.replays import timed

# Largest error of a model of few layers: the norm of the difference over the norm of eager's output.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-9}
# The same for exact arms, in units of the dtype's epsilon.
EXACT_EPSILONS = 2
# Deep models with random weights amplify rounding: eager then differs from itself in another batch by
# more than that, and an arm may differ by this many times as much; exact arms compute in eager's own order.
NOISE_FACTOR, EXACT_NOISE_FACTOR = 3.0, 2.0
# Bytes of the text between one compared batch and the next, so that no two see the same tokens.
STRIDE = 997


class Mismatch(RuntimeError):
    """An arm's output differs from eager's, so its times must not count."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One batch against eager.

    Args:
        count: requests in the batch.
        captured: True if the arm has this exact size, so that nothing was padded.
        error: norm of the difference over norm of eager's output.
        equal: True if equal bit for bit.
        padded_error, padded_equal: the same against eager on the batch padded to the next size, as graphs pad it. Where
            this is exact, `error` is what kernels of another batch size round otherwise.
    """

    count: int
    captured: bool
    error: float
    equal: bool
    padded_error: float
    padded_equal: bool


def compare_with_eager(arm: Arm, setup: Setup, counts: list[int]) -> list[Comparison]:
    """Compare full contexts and mixed ones, at every count.

    Raises:
        Mismatch: an output differs by more than rounding.
        NotReplayed: a graph of ours did not compute it.
    """
    noise = eager_noise(setup)
    comparisons = [
        _compare(arm, setup, count, start=STRIDE * index, mixed=mixed)
        for index, count in enumerate(counts, start=1)
        for mixed in (False, True)
    ]
    for comparison in comparisons:
        _check(arm, comparison, next(setup.model.parameters()).dtype, noise)
    return comparisons


def eager_noise(setup: Setup) -> float:
    """Measure how much eager differs from itself, by rounding, when the same requests are in another batch.

    Kernels are chosen by batch size, and add in another order.
    """
    whole = setup.model(*setup.largest).clone()
    counts = {1, max(1, setup.sizes[0] // 2)}
    alone = {count: setup.model(*(tensor[:count] for tensor in setup.largest)) for count in counts}
    return max(relative_error(rows, whole[:count]) for count, rows in alone.items())


def counts_to_compare(sizes: list[int]) -> list[int]:
    """Choose the smallest, largest and middle size, and a padded batch just below each of these."""
    picked = {sizes[0], sizes[len(sizes) // 2], sizes[-1]}
    return sorted(picked | {size - 1 for size in picked if size > 1})


def _compare(arm: Arm, setup: Setup, count: int, *, start: int, mixed: bool) -> Comparison:
    batch = setup.batch(count, start=start, mixed_lengths=mixed)
    expected = setup.model(*batch).clone()
    padded = rows(setup.largest, padded_size(sorted(setup.sizes), count))
    static: Batch = tuple(tensor.clone() for tensor in padded)  # type: ignore[assignment]
    fill(static, batch)
    as_padded = setup.model(*static)[:count].clone()
    arm(*batch)  # a first call may be eager, and compare a replay with that
    with timed(arm.call(batch), 1) as replay:
        found = replay()
    if found.shape != expected.shape:
        raise Mismatch(f"{arm.name}: batch {count} gave {tuple(found.shape)}, eager gives {tuple(expected.shape)}.")
    error, padded_error = relative_error(found, expected), relative_error(found, as_padded)
    equal, padded_equal = torch.equal(found, expected), torch.equal(found, as_padded)
    return Comparison(count, count in setup.sizes, error, equal, padded_error, padded_equal)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Compute the norm of the difference over the norm of the expected tensor, in float64."""
    expected = expected.double()
    return float(torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected))


def _check(arm: Arm, comparison: Comparison, dtype: torch.dtype, noise: float) -> None:
    allowed = allowed_error(dtype, noise, exact=arm.exact and comparison.captured)
    if not comparison.error <= allowed:  # also refuses NaN
        raise Mismatch(
            f"{arm.name}: batch {comparison.count} differs from eager by {comparison.error:.2e} relative; "
            f"{allowed:.2e} is allowed in {str(dtype).removeprefix('torch.')}, eager itself varies by {noise:.2e}."
        )


def allowed_error(dtype: torch.dtype, noise: float, *, exact: bool) -> float:
    """Return the largest allowed relative error; `exact` for outputs that are computed in eager's own order."""
    if exact:
        return max(EXACT_EPSILONS * torch.finfo(dtype).eps, EXACT_NOISE_FACTOR * noise)
    return max(TOLERANCE[dtype], NOISE_FACTOR * noise)
