"""Padding rows hold what the rule says at every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close
from tests.module.functions import WIDTH, check_sizes, rows

pytestmark = pytest.mark.usefixtures("no_grad")


class Spread(nn.Module):
    """Mixes rows on purpose, so that what stands in padding rows shows."""

    def forward(self, x):
        return x + x.sum(0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(None, 0.0), ("zero", 0.0), (2.5, 2.5), (-1, -1.0), ("repeat-last", None)],
    ids=["default", "zero", "number", "negative", "repeat-last"],
)
def test_padding_rows_hold_what_the_rule_says_at_every_call(device, rule, expected):
    model = sg.wrap(Spread().eval(), capture_sizes=[4, 8], pad_values={} if rule is None else {"x": rule})
    for size, padded in ((4, 4), (8, 8), (4, 4), (8, 8), (3, 4), (2, 4), (8, 8), (5, 8), (3, 4), (7, 8), (1, 4)):
        x = rows(size, device)
        pad = x[-1:] if expected is None else torch.full((1, WIDTH), expected, device=device)
        close(model(x), x + x.sum(0) + (padded - size) * pad[0])
    assert model.graph_stats.replays >= 5


def test_padding_rows_that_are_kept_hold_the_rows_before(device):
    model = sg.wrap(Spread().eval(), capture_sizes=[4], pad_values={"x": "keep"})
    model.capture_graphs(rows(4, device))
    full, part = rows(4, device), rows(2, device)
    close(model(full), full + full.sum(0))
    close(model(part), part + part.sum(0) + full[2:].sum(0))
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("rule", ["zero", 3.0, "repeat-last"])
def test_a_pad_rule_for_a_nested_argument_covers_what_is_inside(device, rule):
    class Nested(nn.Module):
        def forward(self, states):
            return states["x"] + states["x"].sum(0)

    model = sg.wrap(Nested().eval(), capture_sizes=[4], pad_values={"states": rule}, progress=False)
    model.capture_graphs({"x": rows(4, device)})
    x = rows(3, device)
    pad = {"zero": torch.zeros(WIDTH, device=device), "repeat-last": x[-1]}.get(rule, torch.tensor(3.0, device=device))
    close(model({"x": x}), x + x.sum(0) + pad)
    assert model.graph_stats.replays > 0


def test_padding_of_a_dimension_that_is_not_first_is_right_at_every_size(device):
    class Columns(nn.Module):
        def forward(self, x):  # (WIDTH, B)
            return x + x.sum(1, keepdim=True)

    model = sg.wrap(Columns().eval(), capture_sizes=[4, 8], batch_dims={"x": 1}, pad_values={"x": 2.0})
    for size, padded in ((4, 4), (8, 8), (4, 4), (8, 8), (3, 4), (5, 8), (2, 4), (8, 8), (1, 4), (6, 8), (3, 4)):
        x = rows(WIDTH, device, size)
        close(model(x), x + x.sum(1, keepdim=True) + 2.0 * (padded - size))
    assert model.graph_stats.replays >= 5


def test_each_argument_has_its_own_pad_rule(device):
    class Both(nn.Module):
        def forward(self, x, slots):
            return x + x.sum(0), slots + slots.sum(0)

    model = sg.wrap(Both().eval(), capture_sizes=[8], pad_values={"slots": -1}, progress=False)
    model.capture_graphs(rows(8, device), torch.arange(8, device=device))
    for size in (5, 8, 2, 7):
        x, slots = rows(size, device), torch.randint(50, (size,), device=device)
        first, second = model(x, slots)
        close(first, x + x.sum(0))
        assert torch.equal(second, slots + slots.sum(0) - (8 - size))


def test_token_ids_are_padded_with_a_valid_id(device):
    module = nn.Embedding(10, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4, 8])
    check_sizes(model, lambda size: ((torch.randint(10, (size,), device=device),), {}), replays=8)


def test_one_large_batch_does_not_make_every_smaller_call_pad_anew(device):
    module = nn.Linear(6, 6).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4, 16], progress=False, outputs="static")
    with torch.no_grad():
        model.capture_graphs(torch.randn(16, 6, device=device))
        model(torch.randn(16, 6, device=device))
        for _ in range(2):
            x = torch.randn(3, 6, device=device)
            close(model(x), module(x))
        plan = next(plan for plan in model._graph_runner._calls.layouts[0].plans.values() if plan.rows == 3)
        assert plan.inputs.dirty == 3
        static = plan.inputs.inputs["input"]
        assert torch.equal(static.part(16, 3, 16), torch.zeros(13, 6, device=device))
