"""Memory of dropped graphs on a real GPU: an access to memory that was given back takes the whole process down."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROLOGUE = """
import gc
import torch
import simplegraph as sg
from torch import nn

torch.set_grad_enabled(False)
ROWS, WIDTH = 4096, 4096  # an output of 64 MiB lies in a segment of its own, which the driver unmaps


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, device="cuda"))

    def forward(self, x):
        return torch.tanh(x * self.weight)


def empty():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def static_output(**settings):
    model = sg.wrap(Scale().eval(), outputs="static", capture_sizes=[64, ROWS], progress=False, **settings)
    x = torch.randn(ROWS, WIDTH, device="cuda")
    for _ in range(4):
        output = model(x)
    assert model.graph_stats.replays >= 1
    expected = torch.tanh(x * model.weight)
    assert torch.equal(output, expected)
    return model, x, output, expected
"""

BODIES = {
    "reset": "model, x, output, expected = static_output()\nmodel.reset_graphs()",
    "configure": "model, x, output, expected = static_output()\nmodel.configure_graphs(outputs='clone')",
    "death": "model, x, output, expected = static_output()\ndel model",
    "a new generation": (
        "model, x, output, expected = static_output()\n"
        "model.weight = nn.Parameter(model.weight + 1)\n"
        "for _ in range(4): model(x[:64])"
    ),
    "a view alone": "model, x, output, expected = static_output()\ndel model\noutput = output[3:].t()\n"
    "expected = expected[3:].t()",
    "an input of the call that drops the graphs": (
        "model, x, output, expected = static_output()\n"
        "model.weight = nn.Parameter(model.weight + 1)\n"
        "expected = torch.tanh(expected * model.weight)\n"
        "output = model(output)"
    ),
}

EPILOGUE = """
empty()
churn = [torch.full((ROWS, WIDTH), float("nan"), device="cuda") for _ in range(4)]
assert torch.equal(output, expected)
torch.cuda.synchronize()
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("body", BODIES)
def test_a_static_output_stays_readable_whatever_becomes_of_its_graph(body: str) -> None:
    run(PROLOGUE + BODIES[body] + EPILOGUE)


def test_its_memory_goes_back_to_the_device_with_the_last_view() -> None:
    run(
        PROLOGUE
        + """
static_output()  # what the process keeps from its first graphs on
empty()
before = torch.cuda.memory_reserved()
model, x, output, expected = static_output()
view = output[1:]
del model, x, output, expected
empty()
held = torch.cuda.memory_reserved() - before
assert held >= ROWS * WIDTH * 4, held
del view
empty()
assert torch.cuda.memory_reserved() == before, torch.cuda.memory_reserved() - before
"""
    )


def test_sizes_share_memory_though_their_outputs_may_be_kept() -> None:
    run(
        PROLOGUE
        + """
def grown(sizes):
    empty()
    before = torch.cuda.memory_reserved()
    model = sg.wrap(Scale().eval(), outputs="static", capture_sizes=sizes, progress=False)
    model.capture_graphs(torch.randn(ROWS, WIDTH, device="cuda"))
    empty()
    return torch.cuda.memory_reserved() - before

one = grown([ROWS])
assert grown([ROWS * share // 8 for share in range(1, 9)]) <= one + ROWS * WIDTH, one
"""
    )
