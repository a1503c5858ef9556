"""Find the batch dimensions of the arguments and results of breaks, from the traces of two batch sizes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from simplegraph.program.breaks.break_calls import (
    IN_THE_CALL,
    Argument,
    BreakRows,
    BreakTrace,
    Result,
    pass_back,
    pass_view,
    same_value,
)
from simplegraph.program.breaks.marks import PaddedBreak, name_of


def rows_between(one: tuple[int, BreakTrace], other: tuple[int, BreakTrace]) -> list[BreakRows | None] | str:
    """Find the batch dimensions of the arguments and results of breaks.

    Args:
        one: the batch size of a run, and the trace of its breaks.
        other: the same of a run with another batch size.

    Returns:
        The dimensions of each break; None for a break that is passed padding rows, too. Or a sentence that says why
        breaks cannot be passed the real rows alone.
    """
    (a, first), (b, second) = one, other
    if [call.function for call in first.calls] != [call.function for call in second.calls]:
        return f"other eager breaks run at {b} rows than at {a}"
    rows: list[BreakRows | None] = []
    for call, like in zip(first.calls, second.calls, strict=True):
        # Tagged operators are assumed to be attention, which is planned for the padded batch.
        if isinstance(call.function, (PaddedBreak, torch._ops.OpOverload)):
            rows.append(None)
            continue
        name = name_of(call.function)
        before, after = call.arguments or (), like.arguments or ()
        if len(before) != len(after) or call.spec != like.spec or len(call.results) != len(like.results):
            return f"eager break {name} is passed or returns another structure at {b} rows than at {a}"
        try:
            arguments = tuple(map(functools.partial(_argument_dim, a, b), before, after))
            results = tuple(map(functools.partial(_result_dim, arguments, a, b), call.results, like.results))
        except _FollowsOtherwise as why:
            return f"eager break {name} {why}"
        filled = (it.filled or also.filled for it, also in zip(before, after, strict=True))
        rows.append(BreakRows(arguments, results, tuple(filled)))
    return rows


def alike_rows(one: BreakRows | None, other: BreakRows | None) -> bool:
    """True if two breaks have the same batch dimensions."""
    return one is other or (one is not None and other is not None and one[:2] == other[:2])


class _FollowsOtherwise(Exception):
    """A tensor cannot be cut to the rows of a batch."""


def _argument_dim(a: int, b: int, one: Argument, other: Argument) -> int | None:
    if (one.geometry is None) is not (other.geometry is None) or not _same_kind(one.kind, other.kind):
        raise _FollowsOtherwise("is passed another value, object or memory in calls of another batch size")
    if one.geometry is None or other.geometry is None:
        return None
    return _row_dim("is passed", (a, b), one.geometry, other.geometry)


def _result_dim(arguments: Sequence[int | None], a: int, b: int, one: Result, other: Result) -> int | None:
    if one.make is not other.make or not all(map(same_value, one.fixed, other.fixed)):
        raise _FollowsOtherwise("returns another value or kind of result in calls of another batch size")
    if one.make is pass_back:
        index: int = one.fixed[0]
        return arguments[index]
    if not one.geometry:
        return None
    if one.make is pass_view and one.geometry[2] != other.geometry[2]:
        raise _FollowsOtherwise("returns a view of an argument whose beginning follows the number of rows")
    # New tensors are copied, so the layout of their rows in memory does not matter.
    strided = one.make is pass_view
    return _row_dim("returns", (a, b), one.geometry[:2], other.geometry[:2], strided=strided)


def _row_dim(
    verb: str, sizes: tuple[int, int], one: tuple[Any, ...], other: tuple[Any, ...], *, strided: bool = True
) -> int | None:
    """Return the dimension whose length is the batch size in both runs; None if the two shapes are equal."""
    (shape, stride), (shape_after, stride_after) = one, other
    if len(shape) != len(shape_after):
        raise _FollowsOtherwise(f"{verb} a tensor of {len(shape)} dimensions or of {len(shape_after)}")
    pairs = list(zip(shape, shape_after, strict=True))
    differing = [dim for dim, (length, length_after) in enumerate(pairs) if length != length_after]
    if not differing:
        dim = None
    elif len(differing) == 1 and pairs[differing[0]] == sizes:
        dim = differing[0]
    else:
        a, b = sizes
        raise _FollowsOtherwise(f"{verb} a tensor of shape {shape} at {a} rows and {shape_after} at {b}")
    longer = [all(length > 1 for length in pair) for pair in pairs]
    if strided and any(x != y for x, y, counts in zip(stride, stride_after, longer, strict=True) if counts):
        raise _FollowsOtherwise(f"{verb} a tensor in whose memory the rows of a batch are not outermost")
    return dim


def _same_kind(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(_same_kind, one, other))
    if one is IN_THE_CALL or other is IN_THE_CALL:  # warmups on static inputs do not show these
        return True
    if type(one) is weakref.ref and type(other) is weakref.ref:
        return one() is other() is not None
    return same_value(one, other)
