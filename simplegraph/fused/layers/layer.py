"""A recognized layer: its name in reports, the trials of its kernels, the calls that it takes, and how it runs them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from simplegraph.fused.torch_operators import KernelTrial


class AsWritten(Exception):
    """A layer does not take a call, which runs as its class's library has written it; raised before anything runs."""


class Layer(NamedTuple):
    """A recognized layer.

    Attributes:
        kind: name by which it is reported and left out.
        trials: of the kernels that its forward runs.
        run: runs a call of it, from operators and the call's arguments, or raises `AsWritten`.
        dims: it takes calls of one plain tensor of so many dimensions, and no others; None if `run` sees to that.
        bypassed: names of modules in it that are not called, though their weights are used, or whose output is written
            to; dots lead to modules of modules. It takes no call once one of them was replaced or hooked.
    """

    kind: str
    trials: tuple[KernelTrial, ...]
    run: Callable[..., Any]
    dims: int | None = None
    bypassed: tuple[str, ...] = ()


def arguments_of(signature: inspect.Signature, module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a module's forward by name, defaults included."""
    bound = signature.bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
