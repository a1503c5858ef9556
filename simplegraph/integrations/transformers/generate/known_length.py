"""Lets models decode from a cache of fixed length, whose number of tokens only the device knows.

Models make positions from the length: ``torch.arange(length, length + 1)``, ``if length + 2 > self.weights.size(0)``.
With a length on the device, both read it back, which no capture allows. The first is a sum, and the second has the same
answer for every length that a step may have.

Some attend to their cache without a mask, which is right for a cache that ends with the current token, as transformers'
own does. Later positions are hidden from them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "gt": int.__gt__,
    "ge": int.__ge__,
    "lt": int.__lt__,
    "le": int.__le__,
    "eq": int.__eq__,
    "ne": int.__ne__,
}
# Operators on a tensor and a number -> the signs of the two in the result.
_SUMS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("add", "radd", "add_"), (1, 1)),
    **dict.fromkeys(("sub", "sub_"), (1, -1)),
    "rsub": (-1, 1),
}


class _Linear(NamedTuple):
    """A tensor that holds ``sign * length + offset``."""

    tensor: Tensor  # kept, so that no other tensor gets its id
    sign: int
    offset: int


class KnownLength(TorchFunctionMode):
    """Follows a length through sums with numbers, and answers Python's comparisons if all possible lengths agree.

    Args:
        length: zero-dimensional, on the device.
        least, most: bounds of the length, inclusive.
    """

    def __init__(self, length: Tensor, least: int, most: int) -> None:
        super().__init__()
        self._length, self._bounds = length, (least, most)
        self._followed = {id(length): _Linear(length, 1, 0)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        followed = self._followed.get(id(args[0])) if args else None
        if followed is None:
            return func(*args, **kwargs)
        answer = None
        if func is torch.arange and len(args) == 2:
            answer = self._range(followed, args[1], kwargs)
        elif len(args) == 2 and type(args[1]) is int and not kwargs:
            answer = self._answer(func, followed, args[1])
        if answer is not None:
            return answer
        result = func(*args, **kwargs)
        if result is followed.tensor and result is not self._length:  # written in place
            del self._followed[id(result)]
        return result

    def _answer(self, func: Any, followed: _Linear, number: int) -> Any:
        """Return the result of an operator on a followed tensor and a number; None if it does not follow."""
        name = func.__name__.removeprefix("__").removesuffix("__")
        if name in _COMPARISONS:
            low, high = sorted(followed.sign * bound + followed.offset for bound in self._bounds)
            answers = {_COMPARISONS[name](value, number) for value in (low, high)}
            inside = name in ("eq", "ne") and low <= number <= high
            return None if len(answers) > 1 or inside else answers.pop()
        if name not in _SUMS:
            return None
        result = func(followed.tensor, number)
        sign, more = _SUMS[name]
        self._followed[id(result)] = _Linear(result, sign * followed.sign, sign * followed.offset + more * number)
        return result

    def _range(self, start: _Linear, end: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
        """Return the numbers from `start` up to `end`, whose distance is known; None if it is not."""
        followed = self._followed.get(id(end))
        if followed is None or followed.sign != start.sign:
            return None
        dtype, device = kwargs.get("dtype") or torch.int64, kwargs.get("device")
        steps = torch.arange(followed.offset - start.offset, dtype=dtype, device=device or start.tensor.device)
        return steps + start.tensor.to(dtype)


# Classes whose forward takes an additive `attention_mask` (rows, 1, tokens, positions), but is passed None.
_UNMASKED = ("LEDDecoderAttention",)


def unmasked_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that attend without a mask at steps of one token."""
    return [part for part in model.modules() if type(part).__name__ in _UNMASKED]


def masked_forwards(parts: list[nn.Module], position: Tensor, span: int) -> dict[nn.Module, Callable[..., Any]]:
    """Make forwards for the parts that hide all positions after `position` (1,) of a cache of `span` positions."""
    if not parts:
        return {}
    later = torch.arange(span, device=position.device) > position

    def forward(attend: Callable[..., Any], hidden_states: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None and kwargs.get("key_value_states") is None:
            hidden = hidden_states.new_zeros(hidden_states.shape[0], 1, hidden_states.shape[1], span)
            kwargs["attention_mask"] = hidden.masked_fill(later, torch.finfo(hidden.dtype).min)
        return attend(hidden_states=hidden_states, **kwargs)

    return {part: functools.partial(forward, part.forward) for part in parts}
