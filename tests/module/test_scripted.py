"""Modules and functions with graphs are compiled, traced and exported as the plain ones, without graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Layer(nn.Module):
    __jit_unused_properties__ = ["untyped"]  # noqa: RUF012 - torch reads a list

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def untyped(self):
        return {**vars(self)}  # which TorchScript does not know

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            return self.linear(x)
        return -self.linear(x)


class Mixed(sg.CudaGraphWrapper, nn.Linear):
    pass


@sg.cuda_graph
class Decorated(nn.Linear):
    pass


def doubled(x: Tensor) -> Tensor:
    return x * 2


MADE: dict[str, Callable[[], Any]] = {
    "wrapped": lambda: sg.wrap(Layer().eval(), progress=False),
    "inside": lambda: nn.Sequential(nn.ReLU(), sg.wrap(Layer().eval(), progress=False)).eval(),
    "mixin": lambda: Mixed(4, 4).eval(),
    "decorated": lambda: Decorated(4, 4).eval(),
    "unwrapped": lambda: sg.unwrap(sg.wrap(Layer().eval(), progress=False)),
    "function": lambda: sg.wrap(doubled),
}


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("made", MADE)
def test_torch_jit_script_compiles_the_plain_module(made: str, called: bool) -> None:
    model, x = MADE[made](), torch.randn(4, 4)
    for _ in range(5 * called):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        compiled = torch.jit.script(model)
    for rows in (4, 1):
        x = torch.randn(rows, 4)
        assert torch.equal(compiled(x), model(x))
    for _ in range(5):
        model(torch.randn(4, 4))
    graphs = model[1] if made == "inside" else model
    if made != "unwrapped":
        assert graphs.graph_stats.replays >= 3


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("made", ["wrapped", "inside", "mixin", "decorated"])
def test_tracing_and_exporting_see_the_plain_module(made: str, called: bool) -> None:
    model, x = MADE[made](), torch.randn(4, 4)
    for _ in range(5 * called):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced, exported = torch.jit.trace(model, x), torch.export.export(model, (x,))
    x = torch.randn(4, 4)
    assert torch.equal(traced(x), model(x))
    assert torch.equal(exported.module()(x), model(x))
