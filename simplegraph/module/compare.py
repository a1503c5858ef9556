"""Comparing what a replay returned with what eager returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.context import bypassed
from simplegraph.errors import VerificationError
from simplegraph.module.call import invoke
from simplegraph.nested import flatten
from simplegraph.reasons import Reason

# Largest difference allowed, as a share of the largest value: rounding, and other kernels for other sizes.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
TOLERANCE |= {torch.complex128: 1e-9, torch.complex64: 1e-3}


def difference(actual: Any, expected: Any) -> str | None:
    """Say how two leaves differ beyond rounding, or None."""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return None if actual is expected or actual == expected else f"is {actual!r}, eager gives {expected!r}"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            f"has shape {tuple(actual.shape)} and dtype {actual.dtype}, "
            f"eager gives {tuple(expected.shape)} and {expected.dtype}"
        )
    if torch.equal(actual, expected):
        return None
    wide = torch.complex128 if actual.is_complex() else torch.float64
    gap = (actual.to(wide) - expected.to(wide)).abs()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    worst = torch.where(same, 0.0, gap.nan_to_num(nan=float("inf"))).max().item()
    finite = expected.to(wide).abs()
    scale = torch.where(finite.isfinite(), finite, 0.0).max().item()
    if actual.dtype in TOLERANCE and worst <= TOLERANCE[actual.dtype] * scale:
        return None  # integers are not in it: they are equal or not, and large ones look equal as float64
    return f"differs by up to {worst:.3g} (values up to {scale:.3g})"


def first_difference(actual: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Say how the first of several leaves that differs does, or None."""
    if len(actual) != len(expected):
        return f"{len(actual)} values, eager gives {len(expected)}"
    for index, pair in enumerate(zip(actual, expected, strict=True)):
        found = difference(*pair)
        if found is not None:
            return f"output {index} {found}"
    return None


class EagerComparison:
    """One comparison of a replay with eager, which runs first; both draw the same random numbers.

    Args:
        label: what is replayed, as in messages.
        device: whose default generator they draw from.
    """

    def __init__(self, label: str, device: torch.device) -> None:
        self._label = label
        self._device = device
        self._random = random_state(device)
        self._expected: list[Any] = []

    def run_eager(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Call a wrapped module eagerly on copies of its inputs, and expect what it returns."""
        leaves, spec = flatten((args, dict(kwargs)))
        args, kwargs = spec.unflatten(cloned(leaves))
        with bypassed(Reason.NESTED), torch.no_grad():
            self.expect(flatten(invoke(module, args, kwargs))[0])

    def expect(self, leaves: Sequence[Any]) -> None:
        """Keep what eager returned; the random generator goes back to where it started."""
        self._expected = cloned(leaves)
        set_random_state(self._device, self._random)

    def compare(self, leaves: Sequence[Any]) -> None:
        """Compare what the replay returned.

        Raises:
            VerificationError: it differs beyond rounding.
        """
        found = first_difference(leaves, self._expected)
        if found is not None:
            raise VerificationError(
                f"replaying {self._label} does not equal eager: {found}. A forward that mixes rows of the batch is "
                "wrong under padding (try padding=False), and one that keeps Python state cannot be captured; "
                "simplegraph.check(module, inputs) says which."
            )


def cloned(leaves: Sequence[Any]) -> list[Any]:
    """Clone the tensors among leaves."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Put the device's default generator into a state that `random_state` gave."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
