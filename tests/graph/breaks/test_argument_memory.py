"""Arguments of breaks take no memory of their own: what is captured next may use theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from simplegraph.device.select import graph_device
from tests.graph.breaks.models import Model, graphs, piecewise

pytestmark = pytest.mark.usefixtures("inference_mode")


@sg.eager_break
def attend(inputs: Any, out: Tensor | None = None) -> Tensor | None:
    x = inputs if isinstance(inputs, Tensor) else inputs[0]
    if out is None:
        return x * 2
    out.copy_(x * 2)
    return None


def into_a_buffer(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    attend(x, out)
    return out


PASSED: dict[str, tuple[Callable[[Tensor], Any], int]] = {  # and how many tensors the forward still needs after it
    "a tensor": (lambda x: attend(x + 1), 1),
    "in a list": (lambda x: attend([x + 1]), 1),
    "and a buffer": (lambda x: into_a_buffer(x + 1), 1),
    "twice": (lambda x: attend(attend(x + 1) + 1), 1),
}


@pytest.mark.parametrize("kind", PASSED)
def test_a_size_leaves_the_memory_of_arguments_to_the_sizes_after_it(device: torch.device, kind: str) -> None:
    function, needed = PASSED[kind]
    memory, seen = graph_device(device), []

    def middle(x: Tensor) -> Any:
        if not memory.is_capturing():
            return function(x)
        pool = model.graph_manager.pool
        before = len(memory.left_alive(pool))
        result = function(x)
        seen.append(len(memory.left_alive(pool)) - before)
        return result

    module = Model(middle)
    model = piecewise(module, device, capture_sizes=[2, 4, 8])
    x = torch.randn(8, 4, device=device)
    model.capture_graphs(x)
    assert len(graphs(model)) == 3
    assert seen == [needed] * 3
    assert memory.left_alive(model.graph_manager.pool) == set()
    torch.testing.assert_close(model(x), module(x))
