"""Say how values differ from eager's: to the bit, beyond rounding, or beyond a given amount."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.nested import constant_key

Tolerance = Mapping[torch.dtype, float]

# Largest difference allowed, as a share of the largest value: rounding, and other kernels for other sizes.
TOLERANCE: Tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
TOLERANCE = {**TOLERANCE, torch.complex128: 1e-9, torch.complex64: 1e-3}
EXACT: Tolerance = {}
# The same through a whole model: eager itself differs so from one batch size to another.
OTHER_SIZE: Tolerance = {torch.float64: 1e-6, torch.float32: 5e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
OTHER_SIZE = {**OTHER_SIZE, torch.complex128: 1e-6, torch.complex64: 5e-3}
# The same where another batch size runs other operators: such a branch may change little.
OTHER_OPERATORS: Tolerance = {**TOLERANCE, torch.float32: 1e-4, torch.complex64: 1e-4}
_SLACK = 4  # runs may differ by this many times what two like them differed by: two are a small sample
_CHUNK = 1 << 24  # elements that are compared in double precision at a time


def by_least_precise(tolerance: Tolerance, met: Iterable[torch.dtype]) -> Tolerance:
    """Widen a tolerance to that of the least precise dtype which a run met: what it returns was rounded to that.

    Gradients stored in float32 are no more precise than the bfloat16 that autocast computed them in.
    """
    least = max((tolerance.get(dtype, 0.0) for dtype in met), default=0.0)
    return {dtype: max(allowed, least) for dtype, allowed in tolerance.items()}


def difference(actual: Any, expected: Any, *, tolerance: Tolerance = TOLERANCE, noise: Any = None) -> str | None:
    """Say how two leaves differ beyond rounding, or None.

    Args:
        actual: a tensor, or a value with equality.
        expected: what eager gives.
        tolerance: by dtype, the difference allowed as a share of the largest value; others are equal or not.
        noise: another run's `actual`; what these two differ by is allowed.
    """
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return None if _same(actual, expected) else f"is {actual!r}, eager gives {expected!r}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"has shape {tuple(actual.shape)} and dtype {actual.dtype}, "
            f"eager gives {tuple(expected.shape)} and {expected.dtype}"
        )
    if torch.equal(actual, expected):
        return None
    worst, scale = gap(actual, expected)
    spread = 0.0 if noise is None else _SLACK * gap(actual, noise)[0]
    if worst <= max(tolerance.get(actual.dtype, 0.0) * scale, spread):
        return None
    return f"differs by up to {worst:.3g} (values up to {scale:.3g})"


def _same(actual: Any, expected: Any) -> bool:
    return actual is expected or (type(actual) is type(expected) and constant_key(actual) == constant_key(expected))


def gap(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors of one shape and dtype, and the largest finite value expected.

    The difference is 0 only where all values are the same, NaN counting as itself, and infinite where one is NaN or
    they are infinite in another way.
    """
    worst = scale = 0.0
    wide = torch.complex128 if actual.is_complex() else torch.float64
    for one, other in zip(_chunks(actual), _chunks(expected), strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        distance = (one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf"))
        # Large integers that differ may look equal in double precision.
        distance = torch.where(distance == 0, torch.finfo(torch.float64).tiny, distance)
        worst = max(worst, torch.where(same, 0.0, distance).max().item())
        finite = other.to(wide).abs()
        scale = max(scale, torch.where(finite.isfinite(), finite, 0.0).max().item())
    return worst, scale


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    flat = tensor.detach().reshape(-1)
    return (flat[start : start + _CHUNK] for start in range(0, flat.numel(), _CHUNK))


def first_difference(
    actual: Sequence[Any],
    expected: Sequence[Any],
    *,
    names: Sequence[str] = (),
    tolerance: Tolerance = TOLERANCE,
    noise: Sequence[Any] | None = None,
) -> str | None:
    """Say how the first of several leaves that differs does, or None; see `difference`."""
    if len(actual) != len(expected):
        return f"{len(actual)} values, eager gives {len(expected)}"
    for index, pair in enumerate(zip(actual, expected, strict=True)):
        found = difference(*pair, tolerance=tolerance, noise=None if noise is None else noise[index])
        if found is not None:
            return f"{names[index] if names else f'output {index}'} {found}"
    return None


def cloned(leaves: Sequence[Any]) -> list[Any]:
    """Clone the tensors among leaves."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
