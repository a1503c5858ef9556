"""vmap, derivatives, traces and compilers see through a wrapper."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, Attention, DecoratedMlp, Mlp, Outer, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


def test_vmap_and_forward_mode_derivatives_see_through_the_wrapper(device):
    model = wrapped_mlp(device).requires_grad_(False)
    plain = sg.unwrap(model)
    x, tangent = rows(4, device), rows(4, device)
    batch = torch.randn(3, 4, WIDTH, device=device)
    for _ in range(3):
        model(x)
        close(torch.vmap(model)(batch), torch.vmap(plain)(batch))
    with torch.enable_grad():
        for actual, expected in zip(
            torch.func.jvp(model, (x,), (tangent,)), torch.func.jvp(plain, (x,), (tangent,)), strict=True
        ):
            close(actual, expected)
        close(torch.func.grad(lambda z: model(z).sum())(x), torch.func.grad(lambda z: plain(z).sum())(x))
    assert reasons(model)["transformed"] >= 4
    model(x)
    assert model.graph_stats.replays >= 1


def test_dual_numbers_keep_their_tangents(device):
    model = wrapped_mlp(device).requires_grad_(False)
    plain = sg.unwrap(model)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        actual = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
        expected = torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent
    close(actual, expected)
    assert model.graph_stats.replays == 2


@pytest.mark.parametrize("captured", [True, False])
def test_a_trace_of_a_wrapper_is_a_trace_of_the_module(device, captured):
    model = wrapped_mlp(device).requires_grad_(False)
    x = rows(4, device)
    if captured:
        for _ in range(3):
            model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer releases of torch deprecate it
        traced = torch.jit.trace(model, (x,), check_trace=False)
    y = rows(4, device)
    close(traced(y), sg.unwrap(model)(y))


@pytest.mark.parametrize("captured", [True, False])
def test_a_compiled_parent_of_a_wrapper_is_right(device, captured):
    inner = sg.wrap(Attention().to(device).eval(), capture_sizes=[4])
    parent = Outer(inner).to(device).eval()
    x = rows(4, device)
    expected = parent.head(torch.tanh(inner.proj(x)))
    if captured:
        for _ in range(3):
            inner(x)
    torch.compiler.reset()
    compiled = torch.compile(parent, backend="eager", fullgraph=True)
    for _ in range(3):
        close(compiled(x), expected)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("kind", ["module", "decorated", "parent", "function"])
def test_a_wrapper_that_is_compiled_says_that_its_graphs_are_not_used(device, kind, fullgraph, caplog):
    torch.compiler.reset()
    plain = DecoratedMlp() if kind == "decorated" else Mlp()
    plain = plain.to(device).eval()
    if kind == "function":
        served = sg.wrap(lambda x: plain(x) * 2, capture_sizes=[4], progress=False)
    else:
        served = plain if kind == "decorated" else sg.wrap(plain, capture_sizes=[4], progress=False)
    x = rows(4, device)
    expected = Mlp.forward(plain, x) * (2 if kind == "function" else 1)
    whole = nn.Sequential(served) if kind == "parent" else served
    compiled = torch.compile(whole, backend="eager", fullgraph=fullgraph)
    for _ in range(3):
        close(compiled(x), expected)
    assert reasons(served) == {"transformed": 1}
    assert caplog.text.count("torch.compile traces this forward") == 1
    assert "simplegraph.wrap(torch.compile(module))" in str(served.graph_report())


def test_a_compiled_module_can_be_wrapped(device):
    module = Mlp().to(device).eval()
    torch.compiler.reset()
    model = sg.wrap(torch.compile(module, backend="eager"), capture_sizes=[4])
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.replays == 3


def test_a_recurrent_module_and_an_encoder_layer_are_as_in_eager(device):
    modules = [nn.LSTM(WIDTH, 5, batch_first=True), nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)]
    for module in modules:
        module = module.to(device).eval()
        model = sg.wrap(module, capture_sizes=[4, 6])
        for size in (4, 4, 4, 3, 6, 6, 6, 5, 3):
            x = torch.randn(size, 7, WIDTH, device=device)
            torch.testing.assert_close(model(x), module(x), rtol=1e-2, atol=1e-2)  # recurrent kernels use TF32
        assert model.graph_stats.replays >= 4


def test_the_first_capture_does_not_pay_for_importing_dynamo():
    program = (
        "import sys, torch, simplegraph as sg\n"
        "model = sg.wrap(torch.nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False)\n"
        "with torch.no_grad():\n"
        "    model.capture_graphs(torch.randn(2, 4))\n"
        "print(model.graph_stats.captures, 'torch._dynamo' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1", "False"]


def test_dynamo_does_not_trace_the_library_around_a_compiled_part_with_a_graph_break(device):
    def part(x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    class Module(nn.Module):
        def forward(self, x):
            return compiled(x)

    torch.compiler.reset()
    compiled = torch.compile(part, backend="eager")
    torch._dynamo.utils.clear_compilation_metrics()
    x = torch.randn(4, 3, device=device)
    model = sg.wrap(Module().eval(), capture_sizes=[4], progress=False)
    with torch.no_grad():
        model.capture_graphs(x)
        torch.testing.assert_close(model(x), x * 2 + 1)
    assert model.graph_stats.replays == 1
    assert {traced.co_filename for traced in torch._dynamo.utils.get_compilation_metrics()} == {
        __file__
    }  # the part alone
