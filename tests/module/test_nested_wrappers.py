"""Wrapped modules inside wrapped modules: the outer graph owns the inner."""

from __future__ import annotations

import copy

import pytest
import torch

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import Attention, Mlp, Outer, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def test_the_outer_graph_owns_the_inner(device):
    module = Outer(Attention()).to(device).eval()
    reference = copy.deepcopy(module)
    module.inner = sg.wrap(module.inner, capture_sizes=[4])
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(6):
        x = rows(4, device)
        close(model(x), reference(x))
    assert model.graph_stats.replays == 5
    assert model.inner.graph_stats.replays == 0
    assert model.inner.graph_stats.captures == 0
    assert set(reasons(model.inner)) == {"nested"}


def test_an_inner_wrapper_has_its_own_graphs_where_the_outer_has_none(device):
    module = Outer(Attention()).to(device).eval()
    reference = copy.deepcopy(module)
    module.inner = sg.wrap(module.inner, capture_sizes=[6])
    model = sg.wrap(module, capture_sizes=[4])
    for size in (4, 4, 4, 6, 6, 6, 6, 4, 6):
        x = rows(size, device)
        close(model(x), reference(x))
    assert model.graph_stats.replays == 3
    assert reasons(model)["batch_too_large"] == 5
    assert model.inner.graph_stats.replays == 4


def test_an_inner_call_on_its_own_is_still_served_by_its_graphs(device):
    module = Outer(Attention()).to(device).eval()
    module.inner = sg.wrap(module.inner, capture_sizes=[4])
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(4):
        model(x)
    expected = torch.tanh(module.inner.proj(x))
    for _ in range(4):
        close(model.inner(x), expected)
    assert model.inner.graph_stats.replays == 3


def test_two_wrappers_of_one_module_do_not_disturb_each_other(device):
    module = Mlp().to(device).eval()
    one, two = sg.wrap(module, capture_sizes=[4]), sg.wrap(module, capture_sizes=[4], outputs="static")
    for _ in range(5):
        x, y = rows(4, device), rows(4, device)
        first, second = one(x), two(y)
        close(first, module(x))
        close(second, module(y))
    assert one.graph_stats.replays == two.graph_stats.replays == 4
