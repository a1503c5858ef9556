"""Find what follows the batch size unseen: numbers that Python passes to operators, and choices among all rows.

A graph holds the numbers of the size it is for. A maximum over rows may be one of the padding's, though the padding of
a proof is none by chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.operators import argument, facts_of, without_modes
from simplegraph.base.user_code import described_line, running_line

_NUMBERS = frozenset({int, float, complex})
_LIFTED = torch.ops.aten.lift_fresh.default
_SCALAR = torch.ops.aten.scalar_tensor.default
_FULL = torch.ops.aten.full.default
_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.item.default}
_PICKING = {"max", "amax", "min", "amin", "aminmax", "_aminmax", "argmax", "argmin", "any", "all", "topk", "kthvalue"}
_PICKING |= {"median", "nanmedian", "mode", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"}
_NUMBER_REMEDY = (
    "A replay of a padded batch would use the number of the padded size. Add the sizes of your batches to "
    "capture_sizes, or pass the number as a tensor. If it changed for another reason, name it in state_key."
)
_ROWS_REMEDY = "Add the sizes of your batches to capture_sizes, or pick in each row."
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


class ChosenRows(NamedTuple):
    """An operator that picks values among others, as a maximum does.

    Attributes:
        func: the operator.
        given, made: the shapes of the tensors that it is passed and returns.
        memory: the storage keys of what it returns.
        line: the file and the number of the user's line; None if there is none.
    """

    func: Any
    given: tuple[torch.Size, ...]
    made: tuple[torch.Size, ...]
    memory: frozenset[int]
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
        self.choices: list[ChosenRows] = []

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        """Note what an operator is passed, `tensors` among it; this runs for every operator observed."""
        if func is _LIFTED:
            self._note_data(args[0])
        elif not _NUMBERS.isdisjoint(map(type, (*args, *kwargs.values()) if kwargs else args)):
            numeric = (argument(args, kwargs, *place) for place in facts_of(func).numeric)
            found = [number for number in numeric if number.__class__ in _NUMBERS]
            if found and (_makes_number(func, args, kwargs) or any(map(_is_inexact, tensors))):
                self.segments.append(PassedNumbers(func, tuple(found), running_line()))

    def _note_data(self, tensor: Tensor) -> None:
        """Note a number that became a tensor, where reading it needs no wait for the device."""
        if tensor.dim() == 0 and tensor.is_cpu and tensor.is_floating_point():
            with without_modes():
                self.data.append(PassedNumbers(_LIFTED, (tensor.item(),), running_line()))

    def note_choice(self, func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Note an operator that picks values, as a maximum does; this runs for every operator observed."""
        if facts_of(func).name in _PICKING:
            self.choices.append(ChosenRows(func, _shapes(given), _shapes(made), _memory(made), running_line()))
        elif func in _READS:  # for a branch of Python's, which no capture takes
            read = _memory(given)
            self.choices = [chosen for chosen in self.choices if chosen.memory.isdisjoint(read)]

    def choice(self, seen: NumbersSeen) -> ChosenRows | None:
        """Find the first operator that picks as many values among the rows of two batch sizes."""
        if [chosen.func for chosen in self.choices] != [chosen.func for chosen in seen.choices]:
            return None
        pairs = zip(self.choices, seen.choices, strict=True)
        return next((now for now, then in pairs if now.given != then.given and now.made == then.made), None)

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

    def learn(self, seen: NumbersSeen) -> tuple[str, str] | None:
        """Remember a run; return what padding would change, as runs of two sizes tell, and what to do about it."""
        rows = seen.rows
        before = self._seen.pop(rows, None)
        if before is not None and before.other(seen) is not None:
            self._seen.clear()  # it changes at one size, too, so other sizes tell nothing
        found = ((size, known.other(seen)) for size, known in self._seen.items())
        differ = next(((size, *pair) for size, pair in found if pair is not None), None)
        chosen = next(filter(None, map(seen.choice, self._seen.values())), None)
        self._seen[rows] = seen
        while len(self._seen) > _MAX_SIZES:
            del self._seen[next(iter(self._seen))]
        if differ is not None:
            size, then, now = differ
            values = {size: _text(then.numbers), rows: _text(now.numbers)}
            said = ", ".join(f"{values[key]} for {key} rows" for key in sorted(values))
            what = f"a number that the forward computes from the batch size goes into {now.func}{_place(now.line)}"
            return f"{what}: {said}", _NUMBER_REMEDY
        if chosen is not None:
            said = f"{chosen.func}{_place(chosen.line)} picks among all rows, those of padding too"
            return said, _ROWS_REMEDY
        return None


def _shapes(tensors: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in tensors)


def _memory(tensors: Sequence[Tensor]) -> frozenset[int]:
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)


def _place(line: tuple[str, int] | None) -> str:
    return "" if line is None else f" at {described_line(*line)}"


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
