"""Code that torch runs past its dispatcher, or whose errors it swallows: the emulator says what it cannot capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base import patches
from simplegraph.base.reasons import Reason

pytestmark = pytest.mark.usefixtures("no_grad")


class Calling(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def refusal(function: Callable[[Tensor], Tensor]) -> str:
    """Serve calls, each compared with eager to the bit; return why no graph serves them."""
    module = Calling(function).eval()
    model: Any = sg.wrap(module, capture_sizes=[4], padding=False)
    for _ in range(4):
        x = torch.randn(4, 8)
        assert torch.equal(model(x), module(x.clone()))
    eager = model.graph_stats.eager
    # The first run of a compiled function changes state of the compiler's, so that one more run is looked at.
    assert eager[Reason.FIRST_CALL] == 1
    assert eager[Reason.WARMUP] <= 1
    assert eager[Reason.CAPTURE_FAILED] == 3 - eager[Reason.WARMUP]
    (message,) = model.graph_stats.failures.values()
    return str(message)


def test_compiled_code_is_refused_since_its_kernels_show_nowhere() -> None:
    torch.compiler.reset()
    table = torch.randn(8, 8)
    message = refusal(torch.compile(lambda x: x @ table))
    assert "compiled code ran, whose kernels no emulator sees" in message
    assert "On a GPU compiled kernels are captured" in message
    assert not any("CompiledFxGraph" in change for change in patches.installed())


@torch.jit.script
def branching(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x - 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_read_back_inside_a_scripted_function_is_named_though_torchscript_swallows_it() -> None:
    message = refusal(lambda x: branching(x))
    assert "Python read back the value of a tensor, which has none while it is captured" in message
    assert "test_unseen_code.py" in message
