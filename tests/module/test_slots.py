"""Tensors whose names meet are never taken for each other: such calls run eagerly, and say which name it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("inference_mode")


class Difference(nn.Module):
    """Computes with two tensors that lie in one argument, or in two of one name."""

    def __init__(self, one: Any, other: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.one, self.other = one, other

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return (self.one(args, kwargs) - 2 * self.other(args, kwargs)) * self.scale


CALLS: dict[str, tuple[Any, Any, Any]] = {
    "a number and its text as keys": (
        lambda a, b: (({1: a, "1": b},), {}),
        lambda args, kwargs: args[0][1],
        lambda args, kwargs: args[0]["1"],
    ),
    "a key with a dot": (
        lambda a, b: (({"a.b": a, "a": {"b": b}},), {}),
        lambda args, kwargs: args[0]["a.b"],
        lambda args, kwargs: args[0]["a"]["b"],
    ),
    "args beside a keyword args": (
        lambda a, b: ((a,), {"args": [b]}),
        lambda args, kwargs: args[0],
        lambda args, kwargs: kwargs["args"][0],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_whose_names_meet_run_eagerly_with_the_name(name: str, device: torch.device) -> None:
    make, one, other = CALLS[name]
    model = sg.wrap(Difference(one, other).to(device).eval(), capture_sizes=[2, 4], progress=False)
    for rows in (2, 4, 3, 2, 4, 3):
        a, b = torch.randn(2, rows, 3, device=device)
        args, kwargs = make(a, b)
        torch.testing.assert_close(model(*args, **kwargs), a - 2 * b)
    assert model.graph_stats.eager == {sg.Reason.OPAQUE_ARGUMENT: 6}
    assert "two arguments are called " in model.graph_stats.details[sg.Reason.OPAQUE_ARGUMENT]
