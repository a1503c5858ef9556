"""A recognized layer: its name in reports, the trials of its kernels, and the function that runs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from simplegraph.fused.torch_operators import KernelTrial

Forward = functools.partial[Any]  # a class's forward with its module


class Layer(NamedTuple):
    """A recognized layer.

    Attributes:
        kind: name by which it is reported and left out.
        trials: of the kernels that its forward runs.
        run: runs a call of it: from operators, its class's forward, which serves what operators do not take, and the
            call's arguments.
    """

    kind: str
    trials: tuple[KernelTrial, ...]
    run: Callable[..., Any]


def arguments_of(signature: inspect.Signature, module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a module's forward by name, defaults included."""
    bound = signature.bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
