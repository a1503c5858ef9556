"""Lets models compute with the length of their cache as with a number of Python's, though only the device knows it.

Models make positions from the length: ``torch.arange(length, length + 1)``, ``if length + 2 > self.weights.size(0)``.
With a length on the device, both read it back, which no capture allows. The first is a sum, and the second has the same
answer for every length that a step may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "gt": int.__gt__,
    "ge": int.__ge__,
    "lt": int.__lt__,
    "le": int.__le__,
    "eq": int.__eq__,
    "ne": int.__ne__,
}


class _Linear(NamedTuple):
    """A tensor that holds ``sign * length + offset``."""

    tensor: Tensor  # kept, so that no other tensor gets its id
    sign: int
    offset: int


class KnownLength(TorchFunctionMode):
    """Follows a length through sums with numbers, and answers what Python asks of it if all lengths agree.

    Args:
        length: zero-dimensional, on the device.
        least, most: bounds of the length, inclusive.
    """

    def __init__(self, length: Tensor, least: int, most: int) -> None:
        super().__init__()
        self._bounds = least, most
        self._known = {id(length): _Linear(length, 1, 0)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = self._known.get(id(args[0])) if args else None
        if known is None or len(args) != 2:
            return func(*args, **kwargs)
        if func is torch.arange:
            found = self._range(known, args[1], kwargs)
            return func(*args, **kwargs) if found is None else found
        if kwargs or type(args[1]) is not int:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "").strip("_")
        if name in _COMPARISONS:
            answers = {_COMPARISONS[name](known.sign * bound + known.offset, args[1]) for bound in self._bounds}
            inside = name in ("eq", "ne") and not self._is_outside(known, args[1])
            return func(*args) if len(answers) > 1 or inside else answers.pop()
        return self._follow(name, known, args[1], func(*args))

    def _follow(self, name: str, known: _Linear, number: int, result: Any) -> Any:
        """Remember the result of an operator on a followed tensor and a number, if it is a sum or a difference."""
        if name in ("add", "radd"):
            self._known[id(result)] = _Linear(result, known.sign, known.offset + number)
        elif name == "sub":
            self._known[id(result)] = _Linear(result, known.sign, known.offset - number)
        elif name in ("rsub",):
            self._known[id(result)] = _Linear(result, -known.sign, number - known.offset)
        return result

    def _range(self, start: _Linear, end: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the numbers from `start` up to `end`, whose distance is known; None if it is not."""
        known = self._known.get(id(end))
        if known is None or known.sign != start.sign:
            return None
        dtype, device = kwargs.get("dtype") or torch.int64, kwargs.get("device")
        steps = torch.arange(known.offset - start.offset, dtype=dtype, device=device or start.tensor.device)
        return steps + start.tensor.to(dtype)

    def _is_outside(self, known: _Linear, number: int) -> bool:
        values = sorted(known.sign * bound + known.offset for bound in self._bounds)
        return not values[0] <= number <= values[1]
