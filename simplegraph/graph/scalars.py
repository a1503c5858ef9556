"""Numbers that a forward computes in Python and passes to operators: a graph holds those of the size it is for."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from simplegraph.graph.operators import is_higher_order
from simplegraph.graph.user_code import described_line, running_line

_operators: Any = _python_dispatch  # typed loosely because torch leaves it untyped
_NUMBERS = frozenset({int, float, complex})
_NUMERIC = ("Tensor", "number", "float")  # an operator's int is a dimension, a size or an index
_LIFTED = torch.ops.aten.lift_fresh.default
_SCALAR = torch.ops.aten.scalar_tensor.default
_FULL = torch.ops.aten.full.default
_MAX_SIZES = 3  # of as many batch sizes the latest run is remembered


class PassedNumbers(NamedTuple):
    """The numbers that one operator is passed.

    Attributes:
        func: the operator.
        numbers: in the order of its arguments.
        line: the file and the number of the user's line; None if there is none.
    """

    func: Any
    numbers: tuple[Any, ...]
    line: tuple[str, int] | None


class NumbersSeen:
    """The numbers that a run passes to operators on floating tensors, in their order.

    Those of data are kept apart: data may be made on the device. What breaks pass is not looked at: they run at every
    call, and their Python may change for any reason.

    Args:
        rows: the batch size of the run; 0 if it is not known.
    """

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows
        self.segments: list[PassedNumbers] = []
        self.data: list[PassedNumbers] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Note what an operator is passed, `tensors` among it; this runs for every operator observed."""
        if func is _LIFTED:
            self._note_data(args[0])
        elif not _NUMBERS.isdisjoint(map(type, (*args, *kwargs.values()) if kwargs else args)):
            positions, names = _numeric_args(func)
            found = [args[at] for at in positions if at < len(args) and args[at].__class__ in _NUMBERS]
            found += [kwargs[name] for name in names if kwargs.get(name).__class__ in _NUMBERS] if kwargs else ()
            if found and (_makes_number(func, args, kwargs) or any(map(_is_inexact, tensors))):
                self.segments.append(PassedNumbers(func, tuple(found), running_line()))

    def _note_data(self, tensor: Tensor) -> None:
        """Note a number that became a tensor, where reading it needs no wait for the device."""
        if tensor.dim() == 0 and tensor.is_cpu and tensor.is_floating_point():
            with _operators._disable_current_modes():
                self.data.append(PassedNumbers(_LIFTED, (tensor.item(),), running_line()))

    def other(self, seen: NumbersSeen) -> tuple[PassedNumbers, PassedNumbers] | None:
        """Find the first operator that two runs of the same operators pass other numbers."""
        for own, others in ((self.segments, seen.segments), (self.data, seen.data)):
            if [passed.func for passed in own] == [passed.func for passed in others]:
                for pair in zip(own, others, strict=True):
                    if repr(pair[0].numbers) != repr(pair[1].numbers):  # NaN differs from itself
                        return pair
        return None


class NumbersBySize:
    """The numbers of the runs of one signature, by batch size."""

    def __init__(self) -> None:
        self._seen: dict[int, NumbersSeen] = {}

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()

    def learn(self, seen: NumbersSeen) -> str | None:
        """Remember a run; say which number follows the batch size, as runs of two sizes tell, or None."""
        rows = seen.rows
        before = self._seen.pop(rows, None)
        if before is not None and before.other(seen) is not None:
            self._seen.clear()  # it changes at one size, too, so other sizes tell nothing
        found = ((size, known.other(seen)) for size, known in self._seen.items())
        differ = next(((size, *pair) for size, pair in found if pair is not None), None)
        self._seen[rows] = seen
        while len(self._seen) > _MAX_SIZES:
            del self._seen[next(iter(self._seen))]
        if differ is None:
            return None
        size, then, now = differ
        where = "" if now.line is None else f" at {described_line(*now.line)}"
        values = {size: _text(then.numbers), rows: _text(now.numbers)}
        said = ", ".join(f"{values[key]} for {key} rows" for key in sorted(values))
        return f"a number that the forward computes from the batch size goes into {now.func}{where}: {said}"


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _makes_number(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if an operator makes a tensor of one number for another operator, as torch.where does without gradients."""
    if func is not _SCALAR and (func is not _FULL or args[0]):
        return False
    dtype = kwargs.get("dtype")
    return args[-1].__class__ is float if dtype is None else bool(dtype.is_floating_point)


def _text(numbers: tuple[Any, ...]) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers)


@functools.lru_cache(maxsize=4096)
def _numeric_args(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Find where an operator takes numbers of its arithmetic: by position, and by name."""
    if is_higher_order(func):
        return (), ()
    arguments = enumerate(func._schema.arguments)
    found = [(at, arg.name) for at, arg in arguments if str(arg.type).removeprefix("Optional[").rstrip("]") in _NUMERIC]
    return tuple(at for at, _ in found), tuple(name for _, name in found)
