"""Arguments that lie in memory which the forward uses otherwise, too: eager's answer, since a copy misses writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, Function, rows

pytestmark = pytest.mark.usefixtures("no_grad")


class Keeps(Function):
    """Holds a registered buffer and a tensor in a list, of 8 rows each."""

    def __init__(self, function: Any, device: torch.device) -> None:
        super().__init__(function)
        self.register_buffer("buffer", torch.zeros(8, WIDTH))
        self.to(device)
        self.hidden = [torch.zeros(8, WIDTH, device=device)]


def write_buffer(m: Any, x: Tensor) -> Tensor:
    m.buffer.add_(1)
    return x * 2


def write_hidden(m: Any, x: Tensor) -> Tensor:
    m.hidden[0].add_(1)
    return x * 2


def write_input(m: Any, x: Tensor) -> Tensor:
    x.add_(1)
    return m.buffer[: len(x)] * 2 + m.hidden[0].sum()


@sg.eager_break
def _write(module: Any) -> None:
    module.buffer.add_(1)


def write_in_break(m: Any, x: Tensor) -> Tensor:
    _write(m)
    return x * 2


CASES: dict[str, tuple[Any, Callable[[Any], Tensor]]] = {
    "a buffer": (write_buffer, lambda m: m.buffer[:4]),
    "rows of a buffer": (write_buffer, lambda m: m.buffer[1:5]),
    "a hidden tensor": (write_hidden, lambda m: m.hidden[0][4:]),
    "a buffer that is read": (write_input, lambda m: m.buffer[:4]),
    "a hidden tensor that is read": (write_input, lambda m: m.hidden[0][:4]),
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("order", ["from the first call on", "later", "now and then", "upfront"])
@pytest.mark.parametrize("case", [*CASES, "a buffer that a break writes"])
def test_an_argument_that_lies_in_memory_the_forward_writes_is_eagers(
    device: torch.device, case: str, order: str, mode: str
) -> None:
    function, pick = CASES.get(case, (write_in_break, lambda m: m.buffer[:4]))
    module, twin = Keeps(function, device).eval(), Keeps(function, device).eval()
    model = sg.wrap(module, capture_sizes=[4], mode=mode, progress=False)
    if order == "upfront":
        state = [tensor.clone() for tensor in (module.buffer, module.hidden[0])]
        model.capture_graphs(rows(4, device))
        for tensor, before in zip((module.buffer, module.hidden[0]), state, strict=True):
            tensor.copy_(before)
    aliased = {"from the first call on": range(9), "later": range(6, 9), "now and then": range(1, 9, 2)}
    for turn in range(9):
        if turn in aliased.get(order, range(0, 9, 2)):
            args = pick(model), pick(twin)
        else:
            x = rows(len(pick(twin)), device)
            args = x, x.clone()
        close(model(args[0]), function(twin, args[1]))
        close(args[0], args[1])
        close(module.buffer, twin.buffer)
        close(module.hidden[0], twin.hidden[0])
    assert reasons(model).get("aliased", 0) >= 1
    if order != "from the first call on":
        assert model.graph_stats.replays >= 2


def test_arguments_in_memory_that_is_only_read_are_no_reason(device: torch.device) -> None:
    model = sg.wrap(Keeps(lambda m, x: x + m.buffer[: len(x)], device).eval(), capture_sizes=[4], progress=False)
    for _ in range(5):
        model.buffer.copy_(torch.randn(8, WIDTH, device=device))
        close(model(model.buffer[:4]), model.buffer[:4] * 2)
    assert model.graph_stats.replays >= 3


def test_a_cache_by_reference_is_no_reason(device: torch.device) -> None:
    def step(m: Any, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        return x + cache[: len(x)]

    class Step(Keeps):
        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            return step(self, x, cache)

    model = sg.wrap(Step(None, device).eval(), capture_sizes=[4], batch_dims={"cache": "reference"}, progress=False)
    cache, twin = model.buffer, model.buffer.clone()
    for _ in range(6):
        x = rows(4, device)
        close(model(x, cache), step(None, x, twin))
        close(cache, twin)
    assert model.graph_stats.replays >= 3
