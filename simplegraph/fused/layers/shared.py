"""Shares what several layers of a running model compute alike from one tensor, which no layer writes to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from simplegraph.fused.layers.layer import Forward, Layer
from simplegraph.fused.operators import Operators

TIMESTEPS = "timesteps"


class _SharedValues(threading.local):
    """The values of this thread's running model, by what they are computed from; None in no model."""

    found: dict[Any, tuple[Any, Any]] | None = None


_RUNNING = _SharedValues()


def sharing_layer(module: Any) -> Layer:
    """Return the layer of a model whose layers share values."""
    return Layer(TIMESTEPS, (), _share)


def _share(operators: Operators, original: Forward) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        before, _RUNNING.found = _RUNNING.found, {}
        try:
            return original(*args, **kwargs)
        finally:
            _RUNNING.found = before

    return forward


def shared(source: Any, key: Any, compute: Callable[[], Any]) -> Any:
    """Return what is computed from a tensor: once in a call of a model, each time outside of one.

    Args:
        source: the tensor.
        key: what else the value depends on.
        compute: computes it.
    """
    found = _RUNNING.found
    if found is None:
        return compute()
    if (id(source), key) not in found:
        found[id(source), key] = source, compute()  # the tensor, too: no other can get its id meanwhile
    return found[id(source), key][1]
