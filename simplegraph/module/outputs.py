"""Outputs: how they follow the batch size, and which a replay can return."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.graph.tensors import is_wrapper
from simplegraph.nested import TreeSpec
from simplegraph.reasons import CannotBind, Reason

_RETURNABLE = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class OutputShapes:
    """How a forward's output follows its batch size, learnt from two different sizes.

    A dimension that is the same at both is fixed; one that grew in proportion is a batch dimension.
    Anything else cannot be cut out of a padded output, and only exact sizes are replayed then.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._spec: TreeSpec | None = None
        self._rules: list[tuple[tuple[int, int], ...]] | None = None

    def learn(self, batch: int, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Remember what a batch of this size gives.

        Raises:
            CannotBind: the output does not follow the batch size in a way that can be sliced.
        """
        described = _described(leaves)
        if self._spec is not None and self._spec != spec:
            raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, "the output's structure changed between calls")
        self._spec = spec
        if self._rules is not None or batch in self._seen:
            return
        if self._seen:
            self._rules = self._rules_between(batch, described)
        self._seen[batch] = described

    def _rules_between(self, batch: int, described: Sequence[Any]) -> list[tuple[tuple[int, int], ...]]:
        """How the output follows the batch, from this size and the one seen first."""
        other, then = next(iter(self._seen.items()))
        return [_rule(batch, now, other, before) for now, before in zip(described, then, strict=True)]

    @property
    def known(self) -> bool:
        return self._rules is not None

    def can_cut(self, padded: int) -> bool:
        """Whether, once seen at the size `padded` too, outputs can be cut to the real rows."""
        return self.known or any(size != padded for size in self._seen)

    def cut(self, leaves: Sequence[Any], rows: int, padded: int) -> list[Any]:
        """Views of the real rows of a padded output.

        Raises:
            CannotBind: two different sizes have not been seen yet.
        """
        if rows == padded:
            return list(leaves)
        if self._rules is None:
            raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, "only one batch size has been seen so far")
        if padded not in self._seen and self._rules_between(padded, _described(leaves)) != self._rules:
            raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, f"at {padded} rows the output follows the batch otherwise")
        return [_cut(leaf, rule, rows) for leaf, rule in zip(leaves, self._rules, strict=True)]


def _described(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else _Constant(leaf) for leaf in leaves)


def _cut(leaf: Any, rule: tuple[tuple[int, int], ...], rows: int) -> Any:
    for dim, factor in rule:
        leaf = leaf.narrow(dim, 0, rows * factor)
    return leaf


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any

    def same(self, other: object) -> bool:
        return isinstance(other, _Constant) and (self.value is other.value or bool(self.value == other.value))


def _rule(batch: int, now: Any, other: int, before: Any) -> tuple[tuple[int, int], ...]:
    """The (dimension, rows per batch row) pairs of one output, from its shapes at two batch sizes."""
    if isinstance(now, _Constant):
        if now.same(before):
            return ()
        raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, f"the output holds {now.value!r}, which follows the batch size")
    if isinstance(before, _Constant) or len(now) != len(before):
        raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, "an output's rank changes with the batch size")
    rule = []
    for dim, (size, size_before) in enumerate(zip(now, before, strict=True)):
        if size == size_before:
            continue
        if size * other != size_before * batch or size % batch:
            raise CannotBind(
                Reason.OUTPUT_SHAPE_UNKNOWN,
                f"an output of shape {now} at batch {batch} has shape {before} at batch {other}",
            )
        rule.append((dim, size // batch))
    return tuple(rule)


def unreturnable(leaves: Sequence[Any]) -> str | None:
    """The first leaf of an output that a replay cannot return, in words, or None."""
    for leaf in leaves:
        if isinstance(leaf, (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)):
            return f"a {type(leaf).__name__}, whose body would run after the capture; return its values instead"
        if not isinstance(leaf, _RETURNABLE) or (isinstance(leaf, Tensor) and not _is_plain(leaf)):
            return f"a {type(leaf).__name__}"
    return None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not is_wrapper(tensor)
