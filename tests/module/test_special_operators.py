"""Operators that run Python or other code of their own: captured and right, or eager with the reason."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph.base.reasons import Reason
from tests.support.operator_models import CAPTURED, HIDDEN, READING, WIDTH, Using

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of TorchScript
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
]


ELSEWHERE = frozenset(name for name in CAPTURED if name.startswith("flex_attention with"))
HIGHER_ORDER = ("flex_attention", "torch.cond", "while_loop")  # tracing them takes seconds


def in_modes(names: Iterable[str]) -> list[Any]:
    """The names, with grad modes to run them in."""
    return [
        (name, mode)
        for name in names
        for mode in (torch.no_grad, torch.inference_mode)
        if mode is torch.no_grad or not name.startswith(HIGHER_ORDER)
    ]


def served(name: str, mode: Any, device: torch.device, calls: int = 6) -> Any:
    """Each call does what eager does, to the output, the input and the buffers."""
    if device.type == "cuda" and name in ELSEWHERE:
        pytest.skip("on a GPU it copies between host and device: tests/gpu/test_cuda_special_operators.py")
    if name.startswith(HIGHER_ORDER):
        torch.compiler.reset()
    function = (CAPTURED | READING | HIDDEN)[name]
    torch.manual_seed(0)
    module = Using(function).to(device).eval()
    twin = copy.deepcopy(module)
    model: Any = sg.wrap(module, capture_sizes=[4], padding=False)
    with mode():
        for _ in range(calls):
            x = torch.randn(4, WIDTH, device=device)
            given = x.clone()
            assert torch.equal(model(x), twin(given))
            assert torch.equal(x, given)
            assert torch.equal(module.calls, twin.calls)
    return model


@pytest.mark.proofs
@pytest.mark.parametrize(("name", "mode"), in_modes(CAPTURED))
def test_it_is_captured_and_proven_and_replays_what_eager_does(name: str, mode: Any, device: torch.device) -> None:
    stats = served(name, mode, device).graph_stats
    assert (stats.captures, stats.failures) == (1, {})
    assert stats.replays >= 3
    assert [graph.proof for graph in stats.graphs.values()] == ["exact"]


@pytest.mark.parametrize(("name", "mode"), in_modes(READING))
def test_what_reads_back_runs_eagerly_and_says_so(name: str, mode: Any, device: torch.device) -> None:
    stats = served(name, mode, device, calls=4).graph_stats
    assert stats.eager == {Reason.FIRST_CALL: 1, Reason.CAPTURE_FAILED: 3}
    (message,) = stats.failures.values()
    if device.type == "cpu":  # a GPU tells less of what an operator in C or NumPy did
        assert "read back the value of a tensor, which has none while it is captured" in message
    assert "operator_models.py" in message


@pytest.mark.parametrize(("name", "mode"), in_modes(HIDDEN))
def test_what_no_mode_sees_is_right_and_says_why_if_it_is_refused(name: str, mode: Any, device: torch.device) -> None:
    stats = served(name, mode, device).graph_stats
    assert stats.replays >= 4 or stats.eager[Reason.CAPTURE_FAILED] == 5
    assert len(stats.failures) == (stats.replays == 0)
