"""Managers that share a pool of graph memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.device.select import graph_device
from tests.manager.engines import Engine
from tests.support.reserved import reserved

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def pair(device: torch.device) -> tuple[Engine, Engine]:
    first = Engine(device)
    return first, Engine(device, pool=first.manager.pool)


def test_two_managers_in_one_pool_replay_in_any_order(pair: tuple[Engine, Engine]) -> None:
    for engine in pair:
        engine.manager.capture(engine.forward)
    for turn, count in enumerate((3, 8, 1, 8, 8, 2, 4, 5)):
        pair[turn % 2].step(count)
    assert [engine.manager.stats.replays for engine in pair] == [4, 4]


@pytest.mark.parametrize("which", [0, 1])
def test_resetting_one_of_two_managers_in_a_pool_leaves_the_other_whole(
    pair: tuple[Engine, Engine], which: int
) -> None:
    for engine in pair:
        engine.manager.capture(engine.forward)
    pair[which].manager.reset()
    pair[1 - which].step(5)
    assert pair[1 - which].manager.stats.replays == 1
    pair[which].manager.capture(pair[which].forward)
    for engine in pair:
        engine.step(3)
        engine.step(8)
    assert pair[0].manager.pool is pair[1].manager.pool


def test_resetting_both_managers_frees_the_pool_and_both_can_capture_again(
    pair: tuple[Engine, Engine], measured: None
) -> None:
    graphs = pair[0].manager.device
    before = reserved(graphs)
    for _ in range(2):
        for engine in pair:
            engine.manager.capture(engine.forward)
        for engine in pair:
            engine.step(3)
        for engine in pair:
            engine.manager.reset()
        if graphs.emulated:
            assert reserved(graphs) == before
    for engine in reversed(pair):
        engine.manager.capture(engine.forward)
        engine.step(7)


def test_a_manager_outlives_the_one_that_made_its_pool(device: torch.device) -> None:
    first = Engine(device)
    second = Engine(device, pool=first.manager.pool)
    for engine in (first, second):
        engine.manager.capture(engine.forward)
    del engine, first
    second.step(3)
    second.manager.reset()
    second.manager.capture(second.forward)
    second.step(8)
    assert second.manager.stats.replays == 2


def test_a_pool_that_an_engine_made_itself_is_the_engines_to_release(device: torch.device) -> None:
    graphs = graph_device(device)
    pool = graphs.new_pool()
    engine = Engine(device, pool=pool)
    for _ in range(2):
        engine.manager.capture(engine.forward)
        engine.step(3)
        engine.manager.reset()
        assert engine.manager.pool is pool
    graphs.release_pool(pool)


def test_a_manager_and_a_wrapper_can_share_a_pool(device: torch.device) -> None:
    engine = Engine(device)
    settings = {"capture_sizes": [4], "batch_dims": {"input": 0}, "progress": False}
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), pool=engine.manager.pool, **settings)
    engine.manager.capture(engine.forward)
    for _ in range(4):
        x = torch.randn(3, 4, device=device)
        torch.testing.assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
        engine.step(3)
    model.reset_graphs()
    engine.step(3)
    assert model.graph_stats.replays >= 1
    assert engine.manager.stats.replays == 5
