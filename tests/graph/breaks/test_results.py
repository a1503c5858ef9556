"""Whatever a break returns, the next segment reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import BreakError
from tests.graph.breaks.models import Model, Pair, Returning, graphs, piecewise

pytestmark = pytest.mark.usefixtures("inference_mode")


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x + 1,
    "its argument": lambda x: x,
    "its argument, written": lambda x: x.add_(1),
    "a view of its argument": lambda x: x[:, 1:3],
    "a transposed view": lambda x: x.t(),
    "a tuple": lambda x: (x + 1, x[:, :2], x),
    "nested": lambda x: {"a": [x + 1, None], "b": (x.sum(-1), True, 3)},
    "a dataclass": lambda x: Pair(x - 1, x.t()),
    "nothing": lambda x: None,
    "an expanded tensor": lambda x: x.sum().expand(3, 4),
    "channels last": lambda x: x.t().contiguous().t(),
    "empty": lambda x: x[:0] + 1,
    "another dtype": lambda x: x.double(),
    "an integer index": lambda x: x.argmax(-1),
}


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whatever_a_break_returns_the_next_segment_reads_it(
    device: torch.device, kind: str, mode: Callable[[], Any]
) -> None:
    module = Returning(RESULTS[kind])
    model = piecewise(module, device, padding=False, capture_sizes=[3])
    with torch.inference_mode(False), mode():
        for _ in range(6):
            x = torch.randn(3, 4, device=device)
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 5
    assert graphs(model)[0].breaks == 1


def test_a_break_that_writes_into_out_copies_nothing(device: torch.device) -> None:
    seen: list[int] = []

    @sg.eager_break
    def into(x: Tensor, out: Tensor) -> Tensor:
        seen.append(out.data_ptr())
        return torch.mul(x, 2, out=out)

    module = Model(lambda x: into(x, torch.empty_like(x)))
    model = piecewise(module, device, capture_sizes=[4])
    model.capture_graphs(torch.randn(4, 4, device=device))
    program = next(iter(model.graph_manager.programs.values()))
    seen.clear()
    for _ in range(3):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert len(set(seen[::2])) == 1  # replays and eager calls take turns
    assert len(program.breaks) == 1


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [("twice", None), ("split", 1), ("a view beside it", None)],
)
def test_results_that_share_memory_share_it_in_the_graph_too(device: torch.device, kind: str, breaks: Any) -> None:
    def sharing(x: Tensor) -> Any:
        made = x * 2
        return {"twice": (made, made), "split": made.split(2, -1), "a view beside it": (made, made[:, :2])}[kind]

    several = sg.eager_break(sharing)

    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            first, second = several(x + 1)
            first.add_(1)
            return first * 1, second * 1

    module = Writing()
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        for actual, expected in zip(model(x), module(x), strict=True):
            torch.testing.assert_close(actual, expected)
    assert [graph.breaks for graph in graphs(model)] == ([breaks] if breaks else [])
    assert breaks or "overlap in memory" in next(iter(model.graph_stats.failures.values()))


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_what_a_break_writes_into_an_argument_of_the_call_reaches_the_caller(
    device: torch.device, capture: str, rows: int, part: slice
) -> None:
    grow = sg.eager_break(lambda x, y: x[:, part].add_(y[:, part]))

    class Growing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            grow(x, x * 2)
            return x + 1

    module = Growing()
    model = piecewise(module, device, capture_sizes=[4], capture=capture, batch_dims={"x": 0})
    if capture == "upfront":
        model.capture_graphs(torch.randn(4, 4, device=device))
    for _ in range(5):
        x = torch.randn(rows, 4, device=device)
        other = x.clone()
        torch.testing.assert_close(model(x), module(other))
        torch.testing.assert_close(x, other)
    assert model.graph_stats.replays > 0


class Switch:
    """Holds the result of a break; set by a test."""

    function: Callable[[Tensor], Any] = staticmethod(lambda x: x + 1)


@sg.eager_break
def switched(x: Tensor) -> Any:
    return Switch.function(x)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (lambda x: x + 1, lambda x: x[:2] + 1, r"\(2, 4\).*in place of.*\(4, 4\)"),
        (lambda x: x + 1, lambda x: x.double(), "float64.*in place of.*float32"),
        (lambda x: x + 1, lambda x: None, "None in place of a tensor"),
        (lambda x: x + 1, lambda x: (x, x), "a tuple of 2 where it returned one value"),
        (lambda x: x, lambda x: x + 1, "another address"),
        (lambda x: x[:2], lambda x: x[2:], "another address"),
        (lambda x: 3, lambda x: 4, "4 in place of 3"),
        (lambda x: 1, lambda x: True, "True in place of 1"),
    ],
)
def test_another_result_than_before_is_an_error_before_the_next_segment_runs(
    device: torch.device, before: Any, after: Any, words: str
) -> None:
    after_break = torch.zeros(1, device=device)

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result = switched(x * 2)
            after_break.add_(1)
            return x + (result.sum() if isinstance(result, Tensor) else 0)

    Switch.function = before
    module = Counting()
    model = piecewise(module, device, capture_sizes=[4], on_capture_failure="raise")
    x = torch.randn(4, 4, device=device)
    for _ in range(3):
        model(x)
    ran = after_break.item()
    Switch.function = after
    with pytest.raises(BreakError, match="(?s)" + words + ".*reset_graphs"):
        model(x)
    assert after_break.item() == ran
    Switch.function = before
    torch.testing.assert_close(model(x), module(x))


def test_memory_from_elsewhere_is_read_in_place_and_a_move_is_refused(device: torch.device) -> None:
    cache = [torch.ones(4, device=device)]

    @sg.eager_break
    def lookup(x: Tensor) -> Tensor:
        return cache[0]

    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = lookup(x)
            found.add_(1)
            return x + found

    model = piecewise(Reading(), device, capture_sizes=[4], on_capture_failure="raise")
    x = torch.zeros(4, 4, device=device)
    results = [model(x)[0, 0].item() for _ in range(4)]
    assert results == [2, 3, 4, 5]
    assert cache[0][0].item() == 5
    cache[0] = torch.full((4,), 10.0, device=device)
    with pytest.raises(BreakError, match="another address"):
        model(x)
