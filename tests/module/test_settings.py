"""Settings that the environment or a later call changes take effect."""

from __future__ import annotations

import pytest
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import MixinMlp, Mlp, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


def test_the_environment_switches_a_deployed_program_off(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "none")
    model = wrapped_mlp(device)
    x = rows(4, device)
    summary = model.capture_graphs(x)
    assert (summary.captured, summary.failed) == (0, {})
    assert str(summary) == "0 of 0 graphs captured in 0.000 s, 0.0 MiB: graphs are switched off"
    for _ in range(3):
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {"switched_off": 3}


def test_the_environment_wins_over_the_code(device, monkeypatch):
    monkeypatch.setenv("SIMPLEGRAPH_CAPTURE_SIZES", "3")
    monkeypatch.setenv("SIMPLEGRAPH_NUM_WARMUPS", "0")
    model = wrapped_mlp(device)
    for _ in range(3):
        model(rows(3, device))
    assert reasons(model) == {"first_call": 1}
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [3]


@pytest.mark.parametrize(("name", "value"), [("MODE", "fast"), ("CAPTURE_SIZES", "1,x")])
def test_an_invalid_environment_names_the_variable(monkeypatch, name, value):
    monkeypatch.setenv(f"SIMPLEGRAPH_{name}", value)
    with pytest.raises(sg.ConfigError, match=f"SIMPLEGRAPH_{name}"):
        sg.wrap(Mlp())


def _class_with_keyword():
    class Decoder(sg.CudaGraphWrapper, nn.Module, capture_size=[1]): ...


@pytest.mark.parametrize(
    "take",
    [
        lambda: sg.wrap(Mlp(), capture_size=[1]),
        lambda: sg.cuda_graph(type("Decoder", (nn.Module,), {}), capture_size=[1]),
        lambda: sg.CudaGraphManager(device="cpu", capture_size=[1]),
        lambda: MixinMlp().configure_graphs(capture_size=[1]),
        _class_with_keyword,
    ],
    ids=["wrap", "cuda_graph", "CudaGraphManager", "configure_graphs", "class"],
)
def test_a_misspelt_setting_is_told_the_one_that_was_meant(take):
    with pytest.raises(sg.ConfigError, match=r"no such setting: capture_size \(did you mean capture_sizes\?\)"):
        take()


def test_settings_changed_later_take_effect_and_counters_stay(device):
    model = MixinMlp().to(device).eval()
    x = rows(4, device)
    for _ in range(3):
        model(x)
    model.configure_graphs(capture_sizes=[5], batch_dims={"x": 0})
    for _ in range(3):
        close(model(x), Mlp.forward(model, x))
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [5]
    assert model.graph_stats.replays >= 3
    assert MixinMlp.cuda_graph_config.capture_sizes == (2, 4, 7)


def test_instances_of_a_class_may_share_graph_memory_later(device):
    pool = sg.graph_pool(device)
    models = [MixinMlp().to(device).eval() for _ in range(2)]
    x = rows(4, device)
    for model in models:
        for _ in range(3):
            model(x)
        model.use_graph_pool(pool)
    for _ in range(3):
        for model in models:
            close(model(x), Mlp.forward(model, x))
    assert [model.graph_stats.captures for model in models] == [2, 2]  # once in each memory
    assert all(model._graph_runner.manager.pool is pool for model in models)


def test_an_invalid_change_of_settings_changes_nothing(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with pytest.raises(sg.ConfigError, match="verify"):
        model.configure_graphs(verify=-1)
    model(x)
    assert model.graph_stats.replays == 3


def test_reset_drops_graphs_and_later_calls_capture_anew(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        expected = model(x)
    model.reset_graphs()
    assert model.graph_stats.graphs == {}
    assert model.graph_stats.graph_bytes == 0
    for _ in range(3):
        close(model(x), expected)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays == 4
