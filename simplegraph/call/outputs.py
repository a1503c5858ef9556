"""Outputs: their batch dimensions, and types that a replay can return."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.nested import OUTPUT_REMEDIES, RETURNABLE, TreeSpec, Withheld
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import is_wrapper


class OutputShapes:
    """Learns from two batch sizes how a forward's output follows the batch size.

    A dimension with the same length at both sizes is fixed; a dimension whose length grew in proportion is a batch
    dimension. If a dimension does neither, padded outputs cannot be cut, and only exact sizes are replayed.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, ...]] = {}
        self._spec: TreeSpec | None = None
        self._rules: list[tuple[tuple[int, int], ...]] | None = None

    def learn(self, batch: int, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Note the outputs of a batch of this size.

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
        """Return the rules by which outputs follow the batch size, from this size and the first one."""
        other, described_before = next(iter(self._seen.items()))
        return [_rule(batch, now, other, before) for now, before in zip(described, described_before, strict=True)]

    @property
    def is_learnt(self) -> bool:
        """True if two batch sizes have been observed."""
        return self._rules is not None

    def can_cut(self, padded: int) -> bool:
        """True if outputs can be cut to the real rows as soon as the size `padded` is observed."""
        return self.is_learnt or any(size != padded for size in self._seen)

    def cut(self, leaves: Sequence[Any], rows: int, padded: int) -> list[Any]:
        """Return views of the real rows of a padded output.

        Raises:
            CannotBind: fewer than two sizes have been observed.
        """
        if rows == padded:
            return list(leaves)
        if self._rules is None:
            raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, "only one batch size has been seen so far")
        if padded not in self._seen and self._rules_between(padded, _described(leaves)) != self._rules:
            raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, f"at {padded} rows the output follows the batch otherwise")
        return [_cut(leaf, rule, rows) for leaf, rule in zip(leaves, self._rules, strict=True)]


def _described(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Describe leaves as (shape, None) of a tensor or (None, value) of a constant."""
    return tuple((tuple(leaf.shape), None) if issubclass(type(leaf), Tensor) else (None, leaf) for leaf in leaves)


def _cut(leaf: Any, rule: tuple[tuple[int, int], ...], rows: int) -> Any:
    for dim, factor in rule:
        leaf = leaf.narrow(dim, 0, rows * factor)
    return leaf


def _rule(batch: int, now: Any, other: int, before: Any) -> tuple[tuple[int, int], ...]:
    """Return the (dimension, elements per batch row) pairs of an output, from its descriptions at two batch sizes."""
    (now, value), (before, value_before) = now, before
    if now is None:
        if before is None and (value is value_before or bool(value == value_before)):
            return ()
        raise CannotBind(
            Reason.OUTPUT_SHAPE_UNKNOWN, f"the output holds {value!r}, which follows the batch size: leave it out"
        )
    if before is None or len(now) != len(before):
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
    """Describe the first leaf of an output that a replay cannot return; None if all can be returned."""
    for leaf in leaves:
        if issubclass(type(leaf), (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)):
            return f"a {type(leaf).__name__}, whose body would run after the capture; return its values instead"
        if type(leaf) is Withheld:
            return repr(leaf)
        if issubclass(type(leaf), Tensor) and leaf.is_nested:
            return "a nested tensor"
        opaque = issubclass(type(leaf), Tensor) and (leaf.layout is not torch.strided or is_wrapper(leaf))
        if opaque or not issubclass(type(leaf), RETURNABLE):
            name = type(leaf).__name__
            remedies = (f"; {remedy}" for end, remedy in OUTPUT_REMEDIES.items() if name.endswith(end))
            return f"a {name}{next(remedies, '')}"
    return None
