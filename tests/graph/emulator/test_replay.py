"""Replay reads the addresses seen at capture; Python does not run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from simplegraph.base.errors import EmulatorError
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import GRAD_MODES, READ_BACK, assert_same, capture, device


@pytest.mark.parametrize("grad_mode", [*GRAD_MODES, torch.enable_grad])
def test_replay_computes_from_what_the_static_input_holds_now(pool: GraphPool, grad_mode: Any) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with grad_mode(), device.on_capture_stream():
        device.begin(pool)
        output = model(x)
        segment = device.end()
    for _ in range(2):
        x.copy_(torch.randn(4, 3))
        segment.replay()
        assert_same(output.detach(), model(x).detach())


def test_replay_does_not_see_a_parameter_that_was_replaced(pool: GraphPool) -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3)
    segment, output = capture(pool, lambda: x * weight)
    at_capture = weight.data
    weight.data = torch.full((3,), 5.0)
    segment.replay()
    assert output.tolist() == [1, 1, 1]
    at_capture.fill_(2)
    segment.replay()
    assert output.tolist() == [2, 2, 2]


def test_python_does_not_run_again(pool: GraphPool) -> None:
    x, calls = torch.ones(2), []
    segment, output = capture(pool, lambda: calls.append(1) or x * len(calls))  # type: ignore[func-returns-value]
    segment.replay()
    segment.replay()
    assert calls == [1]
    assert output.tolist() == [1, 1]


def test_the_python_of_a_custom_operator_does_not_run_again(pool: GraphPool) -> None:
    calls = []

    @torch.library.custom_op("simplegraph_tests::scale_into", mutates_args=("out",))
    def scale_into(x: Tensor, out: Tensor) -> Tensor:
        calls.append(1)
        out.copy_(x * 2)
        return x + len(calls)

    x, out = torch.ones(2), torch.zeros(2)
    segment, result = capture(pool, lambda: torch.ops.simplegraph_tests.scale_into(x, out))
    assert out.sum() == 0
    x.fill_(3)
    segment.replay()
    assert (calls, out.tolist(), result.tolist()) == ([1], [6, 6], [4, 4])


def test_a_read_back_inside_a_custom_operator_is_found(pool: GraphPool) -> None:
    @torch.library.custom_op("simplegraph_tests::longest", mutates_args=())
    def longest(lengths: Tensor) -> Tensor:
        return torch.zeros(max(lengths.tolist()))

    with pytest.raises(EmulatorError, match=READ_BACK):
        capture(pool, lambda: torch.ops.simplegraph_tests.longest(torch.ones(2, dtype=torch.long)))


def test_replay_is_not_changed_by_the_callers_autocast(pool: GraphPool) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    segment, output = capture(pool, lambda: model(x))
    with torch.autocast("cpu", torch.bfloat16):
        segment.replay()
    assert_same(output, model(x).detach())
