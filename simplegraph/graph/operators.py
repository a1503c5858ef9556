"""Operators as torch dispatches them: a mode that sees each one, and which arguments it writes to."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that Dynamo leaves alone where it is loaded, and that does not load it where it is not.

    Torch disables Dynamo in every mode by importing it at the first operator, which takes seconds.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> OperatorMode:
        """An instance of the class, which Dynamo leaves alone from now on if it is loaded."""
        kind: Any = cls
        if "torch._dynamo" in sys.modules:
            _hide_from_dynamo(kind)
        mode: OperatorMode = object.__new__(kind)
        return mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@functools.cache
def _hide_from_dynamo(mode: Any) -> None:
    mode.__torch_dispatch__ = torch.compiler.disable(mode.__torch_dispatch__)  # type: ignore[no-untyped-call]


def is_collective(func: Any) -> bool:
    """True if the operator communicates with other ranks."""
    return func.namespace in ("c10d", "_c10d_functional")


@functools.lru_cache(maxsize=4096)
def may_draw(func: Any) -> bool:
    """True if the operator draws random numbers, or is not torch's own and may do so unsaid."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prims", "prim")


def written_args(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operator writes to."""
    for position, name, flag in _written(func):
        if flag is not None and not _argument(args, kwargs, *flag):
            continue
        value = _argument(args, kwargs, position, name)
        if value is not None:
            yield value


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs.get(name)


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str, tuple[int, str] | None], ...]:
    """(position, name, flag) of each argument that is written; with a flag, only where that argument is true."""
    arguments = [(index, argument.name) for index, argument in enumerate(func._schema.arguments)]
    aliases = [argument.alias_info for argument in func._schema.arguments]
    # Collectives say nothing of their outputs, which come first.
    always = {index for index, alias in enumerate(aliases) if alias is not None and alias.is_write}
    always |= {0} if func.namespace == "c10d" else set()
    # Batch norm updates its statistics without a word in its schema, but only in training.
    flag = next((place for place in arguments if place[1] in ("training", "use_input_stats")), None)
    flagged = {index for index, name in arguments if flag is not None and name in ("running_mean", "running_var")}
    return tuple(
        (index, name, None if index in always else flag) for index, name in arguments if index in always | flagged
    )
