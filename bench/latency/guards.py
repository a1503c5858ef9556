"""The time of each part of the guards, the device waited for before, as when a call's answer is waited for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.latency.arms import plans
from bench.tools.measure import Figures, synchronize

_REGISTRIES = ("_parameters", "_buffers", "_modules")
DICT_US, TENSOR_US = 0.2, 0.1  # the goal: what guards may cost for each


def held(module: nn.Module) -> Figures:
    """Count the dicts of a module that hold something, those of its submodules included, and its tensors."""
    modules = list(module.modules())
    filled = sum(bool(vars(each)[name]) for each in modules for name in _REGISTRIES)
    return {"dicts": len(modules) + filled, "tensors": sum(1 for _ in (*module.parameters(), *module.buffers()))}


def breakdown(wrapped: Any, batch: tuple[Any, ...], device: torch.device, calls: int) -> Figures:
    """Measure the parts that a replayed call asks, in us: medians, each after a call whose answer was waited for.

    Returns:
        ``dicts`` and ``tensors`` of the module, ``goal_us`` for as many; ``moved``: all that is read of the module
        where nothing is known before, ``reading`` the check of a call, ``plain`` that of plain values before it,
        ``settings`` those of torch.
    """
    layout, plan = next(plans(wrapped))
    module, state = plan.state.module(), plan.state
    found = held(module)
    found["goal_us"] = DICT_US * found["dicts"] + TENSOR_US * found["tensors"]
    check = wrapped._graph_runner._calls.plain.present.check
    parts: dict[str, Callable[[], object]] = {"moved": state.moved, "settings": layout.settings.hold}
    if check is not None:
        parts["plain"] = lambda: check.holds(vars(module))
    reading = state.reading
    if reading is not None:
        parts["reading"] = lambda: reading.holds(vars(module), check)
    for name, part in parts.items():
        taken = []
        for _ in range(calls):
            wrapped(*batch)
            synchronize(device)
            began = time.perf_counter()
            part()
            taken.append(time.perf_counter() - began)
        found[f"{name}_us"] = statistics.median(taken) * 1e6
    return found
