"""A recognized layer: its name in reports, the trials of its kernels, and the function that makes its forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from simplegraph.fused.torch_operators import KernelTrial, Operators

Forward = functools.partial[Any]  # a class's forward with its module


class Layer(NamedTuple):
    """A recognized layer.

    Attributes:
        kind: name by which it is reported and left out.
        trials: of the kernels that its forward runs.
        make: makes its forward from operators and from its class's, which serves what operators do not take.
    """

    kind: str
    trials: tuple[KernelTrial, ...]
    make: Callable[[Operators, Forward], Callable[..., Any]]
