"""Compare a wrapped module with its eager twin: answers, and what calls leave in places of the module."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.nested import flatten

WIDTH = 6


def pair(kind: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = kind().to(device).eval()
    return module, copy.deepcopy(module)


def poison(model: Any) -> None:
    """Fill all that graphs wrote with NaN or 99, as the next replay of another size may overwrite it."""
    manager = model.graph_manager
    for graph in manager.table.graphs.values() if manager else ():
        for leaf in graph.program.outputs:
            if isinstance(leaf, Tensor) and manager.device.in_pool(manager.pool, leaf):
                with torch.inference_mode():
                    leaf.fill_(math.nan if leaf.is_floating_point() else 99)


def compare(model: Any, module: Any, twin: Any, x: Tensor) -> Tensor:
    """Call both, and compare answers and what they left, which must be in no graph's memory."""
    result, expected = model(x), twin(x)
    torch.testing.assert_close(result, expected)
    compare_left(model, module, twin)
    return result


def compare_left(model: Any, module: Any, twin: Any) -> None:
    manager = model.graph_manager
    own_leaves, spec = flatten(module.left())
    leaves, expected_spec = flatten(twin.left())
    assert spec == expected_spec
    for own, others in zip(own_leaves, leaves, strict=True):
        assert type(own) is type(others)
        if isinstance(own, Tensor):
            torch.testing.assert_close(own, others)
            assert own.requires_grad is others.requires_grad
            assert own.is_inference() is others.is_inference()
            assert manager is None or not manager.device.in_pool(manager.pool, own)
        else:
            assert own == others
    poison(model)
    for own, others in zip(own_leaves, leaves, strict=True):
        if isinstance(own, Tensor):
            torch.testing.assert_close(own, others)


def follow(model: Any, module: Any, twin: Any, rows: Sequence[int], device: torch.device) -> None:
    for number in rows:
        compare(model, module, twin, torch.randn(number, WIDTH, device=device))
