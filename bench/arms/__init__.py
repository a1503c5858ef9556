"""The arms: ways to run the Llama that are compared, each imported only when it runs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.arms.base import Arm

ARMS = {
    "eager": "bench.arms.eager:Eager",
    "eager-dtensor": "bench.arms.eager:EagerDTensors",
    "plain-loop": "bench.arms.plain_loop:PlainLoop",
    "lean-loop": "bench.arms.plain_loop:LeanLoop",
    "simplegraph": "bench.arms.graphed:Upfront",
    "simplegraph-dtensor": "bench.arms.graphed:DTensors",
    "simplegraph-lazy": "bench.arms.graphed:Lazy",
    "simplegraph-piecewise": "bench.arms.graphed:Piecewise",
    "simplegraph-fused": "bench.arms.graphed:Fused",
    "simplegraph-piecewise-fused": "bench.arms.graphed:PiecewiseFused",
    "compiled-piecewise": "bench.arms.compiled_piecewise:CompiledPiecewise",
    "compiled-full": "bench.arms.compiled:CompiledFull",
}

# Measured twice: with an empty compile cache, and with the one the first run left.
COMPILED = ("compiled-full", "compiled-piecewise")

# Arms of a model that several ranks run together.
OF_RANKS = ("eager-dtensor", "simplegraph-dtensor")
ALONE = tuple(name for name in ARMS if name not in OF_RANKS)


def load_arm(name: str) -> type[Arm]:
    """Import the class of an arm.

    Raises:
        KeyError: no arm has this name.
    """
    if name not in ARMS:
        raise KeyError(f"no arm is called {name!r}; the arms are {', '.join(ARMS)}.")
    module, _, attribute = ARMS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
