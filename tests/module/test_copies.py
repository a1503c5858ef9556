"""Copies and pickles of wrapped modules have weights, settings and graphs of their own."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import SIZES, Attention, DecoratedMlp, MixinMlp, Mlp, Outer, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


def _copies(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return {
        "pickle": pickle.loads(pickle.dumps(model)),
        "deepcopy": copy.deepcopy(model),
        "torch.save": torch.load(stream, weights_only=False),
    }


@pytest.mark.parametrize("way", ["mixin", "decorator", "instance"])
@pytest.mark.parametrize("how", ["pickle", "deepcopy", "torch.save"])
def test_a_copy_has_weights_and_settings_and_graphs_of_its_own(device, way, how):
    make = {"mixin": MixinMlp, "decorator": DecoratedMlp, "instance": Mlp}[way]
    model = make().to(device).eval()
    if way == "instance":
        model = sg.wrap(model, capture_sizes=SIZES)
    x = rows(4, device)
    for _ in range(4):
        expected = model(x)
    other = _copies(model)[how]
    assert type(other) is type(model)
    assert other.graph_stats.replays == 0
    for _ in range(4):
        close(other(x), expected)
    assert [graph.size for graph in other.graph_stats.graphs.values()] == [4]
    other.down.weight.zero_()
    close(other(x), x)
    close(model(x), expected)


def test_the_module_under_a_wrapper_pickles_as_itself(device):
    module = Mlp().to(device).eval()
    model = sg.wrap(module, capture_sizes=SIZES)
    x = rows(4, device)
    for _ in range(4):
        model(x)
    other = pickle.loads(pickle.dumps(module))
    assert type(other) is Mlp
    close(other(x), module(x))
    close(copy.deepcopy(module)(x), module(x))


def test_a_shallow_copy_does_not_share_attributes_set_later(device):
    model = wrapped_mlp(device)
    other = copy.copy(model)
    other.label = "copy"
    assert not hasattr(model, "label")
    assert other.up is model.up
    x = rows(4, device)
    close(other(x), model(x))


def test_a_parent_with_a_wrapped_child_copies_and_keeps_its_keys(device):
    parent = Outer(Attention()).to(device).eval()
    keys = list(parent.state_dict())
    parent.inner = sg.wrap(parent.inner, capture_sizes=[4])
    assert list(parent.state_dict()) == keys
    x = rows(4, device)
    expected = parent(x)
    other = copy.deepcopy(parent)
    assert isinstance(other.inner, sg.CudaGraphWrapper)
    for _ in range(4):
        close(other(x), expected)
    assert other.inner.graph_stats.replays == 3
    assert parent.inner.graph_stats.replays == 0


def test_the_environment_is_not_written_into_a_pickle(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "none")
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    assert reasons(model) == {"switched_off": 3}
    stored = pickle.dumps(model)
    monkeypatch.delenv("SIMPLEGRAPH_MODE")
    other = pickle.loads(stored)
    for _ in range(3):
        other(x)
    assert other.graph_stats.replays == 2
