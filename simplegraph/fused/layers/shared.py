"""Shares what several layers of a running model compute alike from one tensor, until somebody writes to that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from simplegraph.fused.layers.classes import hooked
from simplegraph.fused.layers.layer import Layer
from simplegraph.fused.torch_operators import Operators

TIMESTEPS = "timesteps"


class _SharedValues(threading.local):
    """The values of this thread's running model, by what they are computed from; None in no model."""

    found: dict[Any, tuple[Any, int | None, Any]] | None = None


_RUNNING = _SharedValues()


def sharing_layer(module: Any) -> Layer:
    """Return the layer of a model whose layers share values."""
    return Layer(TIMESTEPS, (), functools.partial(_share, functools.partial(type(module).forward, module)))


def _share(original: Callable[..., Any], operators: Operators, *args: Any, **kwargs: Any) -> Any:
    before, _RUNNING.found = _RUNNING.found, {}
    try:
        return original(*args, **kwargs)
    finally:
        _RUNNING.found = before


def shared(layer: nn.Module, source: Any, key: Any, compute: Callable[[], Any]) -> Any:
    """Return what is computed from a tensor: once in a call of a model, each time outside of one.

    Args:
        layer: computes it; again if it is hooked and gets an inference tensor, which does not count a hook's writes.
        source: the tensor.
        key: what else the value depends on.
        compute: computes it.
    """
    found = _RUNNING.found
    if found is None:
        return compute()
    version = source._version if isinstance(source, Tensor) and not source.is_inference() else None
    kept = found.get((id(source), key))
    if kept is None or kept[1] != version or (version is None and hooked(layer)):
        kept = source, version, compute()  # the tensor, too: no other can get its id meanwhile
        found[id(source), key] = kept
    return kept[2]
