"""Operators that run Python or kernels of their own, on a GPU: captured and right, or eager with the reason."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import simplegraph as sg
from simplegraph.base.reasons import Reason
from tests.support.operator_models import CAPTURED, HIDDEN, READING, WIDTH, Using, heads

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = [
    pytest.mark.usefixtures("device_left_alone"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TorchScript
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]


@triton.jit
def _scale_kernel(x, y, weight, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at, mask=inside) * tl.load(weight + at % 8, mask=inside), mask=inside)


@torch.library.triton_op("simplegraph_tests::triton_scale", mutates_args={})
def triton_scale(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.library.wrap_triton(_scale_kernel)[(triton.cdiv(x.numel(), 64),)](x, y, weight, x.numel(), BLOCK=64)
    return y


@torch.library.triton_op("simplegraph_tests::triton_scale_", mutates_args={"x"})
def triton_scale_(x: Tensor, weight: Tensor) -> None:
    torch.library.wrap_triton(_scale_kernel)[(triton.cdiv(x.numel(), 64),)](x, x, weight, x.numel(), BLOCK=64)


def in_place_by_triton(m: Any, x: Tensor) -> Tensor:
    """It writes to the caller's tensor, and says so."""
    triton_scale_(x, m.table[0])
    return x @ m.weight


_compiled_flex = torch.compile(flex_attention, dynamic=False)
_compiled_part = torch.compile(lambda x, weight: (x @ weight).sin() * 2 + x, dynamic=False)


def compiled_flex(m: Any, x: Tensor) -> Tensor:
    q = heads(m, x).repeat(1, 1, 8, 2)  # the kernel takes heads of 16, and blocks of 128
    return _compiled_flex(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))  # type: ignore[return-value]


GPU_ONLY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "compiled flex_attention": compiled_flex,
    "a compiled part": lambda m, x: _compiled_part(x, m.weight),
    "a Triton operator": lambda m, x: triton_scale(x @ m.weight, m.table[0]),
    "a Triton operator that writes to the input": in_place_by_triton,
}


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], autouse=True)
def _grad_mode(request: pytest.FixtureRequest) -> Any:
    with request.param():
        yield


def served(function: Callable[[Any, Tensor], Tensor], calls: int = 8, eager_runs: int = 0) -> Any:
    """Each call does what eager does, to the bit: to the output, the input and the buffers."""
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.inference_mode(False):
        module = Using(function).cuda().eval()
        twin = copy.deepcopy(module)
    model: Any = sg.wrap(module, capture_sizes=[4], padding=False)
    for call in range(calls):
        x = torch.randn(4, WIDTH, device="cuda")
        given = x.clone()
        with sg.eager() if call < eager_runs else contextlib.nullcontext():
            assert torch.equal(model(x), twin(given))
        assert torch.equal(x, given)
        assert torch.equal(module.calls, twin.calls)
    return model


# Its own text, without the compiler, brings numbers from the host inside an operator that is run whole.
EAGER_FLEX = {name for name in CAPTURED if name.startswith("flex_attention with")}


@pytest.mark.proofs
@pytest.mark.parametrize("name", sorted((CAPTURED.keys() | GPU_ONLY.keys()) - EAGER_FLEX))
def test_it_is_captured_and_proven_and_replays_what_eager_does(name: str) -> None:
    stats = served((CAPTURED | GPU_ONLY)[name], calls=10, eager_runs=2).graph_stats
    assert (stats.captures, stats.failures) == (1, {})
    assert stats.replays >= 3
    (proof,) = [graph.proof for graph in stats.graphs.values()]
    # Compiled code takes its memory past torch's operators, so a proof finds other memory written at every call.
    assert proof == ("unverified: it keeps writing to other memory" if name == "a compiled part" else "exact")


@pytest.mark.parametrize("name", CAPTURED | GPU_ONLY)
def test_it_is_right_with_the_usual_warmup(name: str) -> None:
    """Code that compiles at its second or third run may fail in a capture, and then says why."""
    stats = served((CAPTURED | GPU_ONLY)[name]).graph_stats
    assert stats.replays >= 4 or stats.eager[Reason.CAPTURE_FAILED] >= 4
    assert len(stats.failures) == (stats.replays == 0), stats.failures


@pytest.mark.parametrize("eager_runs", [0, 2])
@pytest.mark.parametrize("name", READING | HIDDEN)
def test_what_reads_back_or_is_hidden_is_right_and_says_why_if_it_is_refused(name: str, eager_runs: int) -> None:
    stats = served((READING | HIDDEN)[name], eager_runs=eager_runs).graph_stats
    assert stats.replays >= 3 or stats.eager[Reason.CAPTURE_FAILED] >= 3
    assert len(stats.failures) == (stats.replays == 0), stats.failures
    for message in stats.failures.values():
        assert "operator_models.py" in message
        assert "Fix it, or" not in message, "a cause and a remedy are known"
