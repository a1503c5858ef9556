"""Compares what a served model returns with what it returns eagerly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}
INSIDE = (dict, list, tuple, set)


class WrongAnswer(Exception):
    """An answer differs from eager's by more than rounding."""


def clone(answer: Any) -> list[Any]:
    """Return the leaves of an answer, its tensors as copies on the CPU."""
    return [leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves(answer)]


def leaves(answer: Any) -> Iterator[Any]:
    """Yield the tensors and plain values in an answer: in containers, dataclasses and objects with fields."""
    if isinstance(answer, np.ndarray):
        yield torch.from_numpy(np.ascontiguousarray(answer))
    elif isinstance(answer, (Tensor, bool, int, float, str, type(None))):
        yield answer
    elif hasattr(answer, "items"):
        for _, value in answer.items():
            yield from leaves(value)
    elif isinstance(answer, INSIDE):
        for value in answer:
            yield from leaves(value)
    elif dataclasses.is_dataclass(answer):
        for field in dataclasses.fields(answer):
            yield from leaves(getattr(answer, field.name))
    elif hasattr(answer, "__dict__"):  # a cache, an image list
        yield from leaves({name: value for name, value in vars(answer).items() if not callable(value)})


def difference(found: Any, expected: list[Any], visible: Tensor | None = None) -> float:
    """Return the largest difference from eager's leaves, relative to the largest value of each.

    Args:
        found: the answer; expected: `clone` of eager's.
        visible: (rows, length) bool, the tokens whose results count; None for all.

    Raises:
        WrongAnswer: something else than rounding differs.
    """
    others = clone(found)
    if len(others) != len(expected):
        raise WrongAnswer(f"an answer of {len(others)} values where eager's has {len(expected)}")
    return max((_apart(*pair, visible) for pair in zip(others, expected, strict=True)), default=0.0)


def _apart(found: Any, wanted: Any, visible: Tensor | None) -> float:
    if not isinstance(wanted, Tensor):
        if isinstance(wanted, float) and math.isclose(found, wanted, rel_tol=1e-3):
            return 0.0
        if found != wanted:
            raise WrongAnswer(f"{found!r} where eager's is {wanted!r}")
        return 0.0
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise WrongAnswer(f"{_described(found)} where eager's is {_described(wanted)}")
    if visible is not None and wanted.shape[:2] == visible.shape:
        found, wanted = found[visible], wanted[visible]
    if not wanted.is_floating_point() or not wanted.numel():
        if not torch.equal(found, wanted):
            raise WrongAnswer(f"{int((found != wanted).sum())} of {wanted.numel()} whole numbers differ")
        return 0.0
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    largest = wanted[wanted.isfinite()].abs().max() if wanted.isfinite().any() else torch.tensor(1.0)
    apart = float(((found.double() - wanted.double()).abs() / largest.clamp(min=1e-30)).masked_fill(same, 0).max())
    if not apart <= ROUNDING[wanted.dtype]:
        raise WrongAnswer(f"{_described(wanted)} differs by {apart:.3g} of the largest value")
    return apart


def _described(leaf: Any) -> str:
    return f"{leaf.dtype} of {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
