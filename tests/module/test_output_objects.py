"""The objects that calls return: of eager's class, and the caller's own even where their memory is the graph's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.nested import flatten
from tests.module.functions import graphed, rows


class Tagged(Tensor):
    """A class of the user's without memory of its own."""


CLASSES: dict[str, Callable[[Any, Tensor], Any]] = {
    "a parameter": lambda m, x: nn.Parameter(x + 1, requires_grad=False),
    "a parameter that wants gradients": lambda m, x: (x * 2, nn.Parameter(x + 1)),
    "the user's class": lambda m, x: {"made": (x + 1).as_subclass(Tagged), "x": x},
    "a view of the user's class": lambda m, x: (lambda y: (y, y[:, :2].as_subclass(Tagged)))(x + 1),
    "the input as a parameter": lambda m, x: (nn.Parameter(x, requires_grad=False), x * 2),
    "the input as the user's class": lambda m, x: (x.as_subclass(Tagged), x * 2),
}


def classes(result: Any) -> list[tuple[type, bool]]:
    return [(type(leaf), leaf.requires_grad) for leaf in flatten(result)[0]]


@pytest.mark.proofs
@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("kind", CLASSES)
def test_outputs_are_of_eagers_class(device: torch.device, kind: str, upfront: bool, outputs: str) -> None:
    model = graphed(device, CLASSES[kind], capture_sizes=[4], outputs=outputs)
    eager = sg.unwrap(model)
    if upfront:
        model.capture_graphs(rows(4, device))
    for size in (4, 4, 4, 4, 3, 3, 3, 4):
        x = rows(size, device)
        actual, expected = model(x), eager(x)
        assert classes(actual) == classes(expected)
        assert torch.equal(*(flatten(result)[0][0].as_subclass(Tensor) for result in (actual, expected)))
    assert model.graph_stats.replays == 0
    said = str(model.graph_report())
    assert "Parameter" in said or "Tagged" in said


@pytest.mark.proofs
@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_a_parameter_of_the_module_is_returned_itself(device: torch.device, outputs: str) -> None:
    model = graphed(device, lambda m, x: (m.weight, x + 1), capture_sizes=[4], outputs=outputs)
    for _ in range(6):
        x = rows(4, device)
        weight, more = model(x)
        assert weight is model.weight
        assert torch.equal(more, x + 1)
    assert model.graph_stats.replays >= 3


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    "returned",
    [lambda m, x: x + 1, lambda m, x: (x + 1, x * 2), lambda m, x: (lambda y: (y, y, y[1:]))(x + 1)],
    ids=["one", "two", "twice and a view"],
)
def test_what_a_caller_does_to_a_static_output_does_not_stay(device: torch.device, returned: Any) -> None:
    model = graphed(device, returned, capture_sizes=[4], outputs="static")
    eager, address = sg.unwrap(model), 0
    for turn in range(8):
        x = rows(4, device)
        actual, expected = (flatten(call(x))[0] for call in (model, eager))
        for output, other in zip(actual, expected, strict=True):
            assert (output.shape, output.stride()) == (other.shape, other.stride())
            assert torch.equal(output, other)
            assert not hasattr(output, "mark")
        assert [leaf is actual[0] for leaf in actual] == [leaf is expected[0] for leaf in expected]
        assert turn < 4 or actual[0].data_ptr() == address
        address = actual[0].data_ptr()
        actual[0].mark = turn
        actual[0].unsqueeze_(0)
        actual[-1].t_() if actual[-1] is not actual[0] else actual[0].squeeze_(0).t_()
    assert model.graph_stats.replays >= 5
