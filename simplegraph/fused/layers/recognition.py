"""Proves by examples that a module's own forward and fused operators compute the same, before these replace it.

A candidate is found by its contents: the names and shapes of its weights and parts. Its forward then runs beside the
operators, on the CPU, with other weights and stand-ins for its parts, in each dtype that the operators take. It may run
smooth operators only, such as products and roots: two compositions of these that agree on numbers of all sizes agree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.operators import OperatorMode, without_modes
from simplegraph.fused.layers.provable import plain_class, provable_code, settings_read

# Operators without cases, so that examples cannot miss one: no comparison, clamp, maximum, choice or random number.
SMOOTH = frozenset(
    (
        *("_fused_rms_norm", "_to_copy", "_unsafe_view", "add", "alias", "cat", "clone", "detach", "div", "erf"),
        *("expand", "gelu", "mean", "mul", "native_layer_norm", "neg", "pow", "reciprocal", "reshape", "rms_norm"),
        *("rsqrt", "sigmoid", "silu", "slice", "split", "sqrt", "square", "sub", "tanh", "unsqueeze", "view"),
    )
)
_NO_PARTS: Mapping[str, Any] = {}


class Candidates:
    """Makes candidates of modules, for one search: it looks at each class once."""

    def __init__(self) -> None:
        self._codes: dict[Any, tuple[FunctionType, ...]] = {}

    def of(self, module: nn.Module, words: Collection[str]) -> Candidate | None:
        """Return a module as a candidate; None if examples can prove nothing of its forward.

        Args:
            module: has the names and shapes that the operators need.
            words: names that a forward of the user's own may read, see `provable_code`.
        """
        kind: Any = plain_class(module)
        key = kind, frozenset(words)
        if key not in self._codes:
            self._codes[key] = provable_code(kind, kind.forward, words)
        code = self._codes[key]
        settings = settings_read(module, code) if code else None
        return None if settings is None else Candidate(module, code, settings)


class Candidate(NamedTuple):
    """A module whose forward may compute the same as fused operators.

    Attributes:
        module: the module.
        code: its class's forward, and the functions that this calls.
        settings: attributes that `code` reads beside weights and parts; a proof holds for their values only.
    """

    module: Any
    code: tuple[FunctionType, ...]
    settings: dict[str, Any]

    @property
    def arguments(self) -> int:
        """The number of arguments that the forward takes by position, beside the module."""
        return self.code[0].__code__.co_argcount - 1

    def proves(self, question: Any, compare: Callable[[Candidate, torch.dtype], bool], *dtypes: torch.dtype) -> bool:
        """True if a comparison holds in each dtype. Each question about equal modules is answered once.

        Args:
            question: names the comparison, with all that it depends on beside code and settings.
            compare: True if the forward's results are those of the operators; an exception in it or the forward counts
                as False.
            dtypes: to compare in.
        """
        key = (plain_class(self.module), self.code, tuple(self.settings.items()), question)
        return answered(key, functools.partial(compare, self), *dtypes)

    def run(
        self, *args: Any, weights: Mapping[str, Tensor] = _NO_PARTS, parts: Mapping[str, Any] = _NO_PARTS, **kwargs: Any
    ) -> tuple[Any, list[str]]:
        """Run the module's own forward with other weights and parts; return its result and the operators that ran."""
        with _Names() as names:
            result = plain_class(self.module).forward(self.stand_in(weights, parts), *args, **kwargs)
        return result, names.operators

    def stand_in(self, weights: Mapping[str, Tensor] = _NO_PARTS, parts: Mapping[str, Any] = _NO_PARTS) -> Any:
        """Return an object of the module's class with its settings, and with other weights and parts."""
        made = object.__new__(plain_class(self.module))
        vars(made).update(vars(self.module))
        vars(made).update(_parameters=dict(weights), _buffers={}, _modules=dict(parts))
        return made

    def runs_to(self, expected: Tensor, *args: Any, **given: Any) -> bool:
        """True if the module's own forward gives an expected tensor, but for rounding, by smooth operators."""
        result, names = self.run(*args, **given)
        return close(result, expected) and SMOOTH.issuperset(names)


_ANSWERS: dict[Any, bool] = {}
_MAX_ANSWERS = 1024


def answered(question: Any, agrees: Callable[[torch.dtype], bool], *dtypes: torch.dtype) -> bool:
    """True if a comparison holds in each dtype; each question is answered once.

    Args:
        question: all that the comparison depends on; an empty one counts as False.
        agrees: compares; an exception in it counts as False.
        dtypes: to compare in.
    """
    answer = _ANSWERS.get(question) if question else False
    if answer is None:
        with _alone():
            answer = _agrees(agrees, dtypes)
        if len(_ANSWERS) >= _MAX_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[question] = answer
    return answer


def _agrees(agrees: Callable[[torch.dtype], bool], dtypes: Sequence[torch.dtype]) -> bool:
    try:
        return all(map(agrees, dtypes))
    except Exception:  # the forward expects other arguments: the examples prove nothing then
        return False


def close(tensor: Any, expected: Tensor) -> bool:
    """True if a tensor equals the expected one, up to the rounding of some operators: three in half precision."""
    if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (expected.shape, expected.dtype):
        return False
    tolerance = 4 * torch.finfo(expected.dtype).eps * (1 if expected.dtype.itemsize == 2 else 8)
    return torch.allclose(tensor, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def _alone() -> Iterator[None]:
    """Run operators unseen by the caller's modes, captures included, and without gradients or autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())  # first: function modes see others being entered
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(without_modes())
        yield


class _Names(OperatorMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[str] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note an operator, and run it."""
        self.operators.append(func.name().partition("::")[2].partition(".")[0])
        return super().run(func, args, kwargs)


class Opaque:
    """An argument that a forward may only pass on."""

    __slots__ = ()

    def __bool__(self) -> bool:
        raise TypeError("an example's argument has no truth value")


class Calls:
    """Stands in for the parts of a module: notes their calls, and gives the same numbers for the same call.

    Args:
        names: of the parts.
        like: an example of a result.
        several: how many results a part has, by its name; other parts have one, outside of a tuple.
    """

    def __init__(self, names: Collection[str], like: Tensor, several: Mapping[str, int]) -> None:
        self.parts = {name: functools.partial(self._call, name) for name in names}
        self._like, self._several = like, several
        self._made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        self._made.append((name, args, kwargs))
        number = 1.0 + len(self._made) + sorted(self.parts).index(name) / len(self.parts)
        with without_modes():  # the module's own operators are noted
            result = torch.cos(self._like.double() * number + number).to(self._like.dtype)
        rest = range(1, self._several.get(name, 1))
        return (result, *((name, len(self._made), place) for place in rest)) if rest else result

    def same(self, other: Calls) -> bool:
        """True if other stand-ins were called in the same order, with the same arguments."""
        return same(self._made, other._made)


def same(one: Any, other: Any) -> bool:
    """True if two nested values have equal tensors and are otherwise the same."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one is other or (isinstance(one, (str, int, float)) and one == other)


def holds(module: nn.Module, *weights: str) -> bool:
    """True if a module has these parameters, each of one dimension, and nothing else except settings.

    More parameters, buffers, tensors, parts, or a method set on the module count as something else.
    """
    if module._modules or any(getattr(module._parameters.get(name), "ndim", 0) != 1 for name in weights):
        return False
    tensors = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    own = (callable(value) or isinstance(value, Tensor) for value in vars(module).values())
    return len(tensors) == len(weights) and not any(own)
