"""Ranks and groups that die are an error on every rank that is left, within a bound."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import simplegraph as sg
from tests.distributed.launch import GONE, Failed, run_ranks, values
from tests.distributed.models import BOUND, SIZES, WAIT, InPlace, batch, capture_with, timed_error


@pytest.mark.parametrize("size", [2, 4])
def test_the_ranks_that_are_left_learn_within_a_bound_that_one_died(size: int) -> None:
    *left, dead = run_ranks(capture_with, size, "dies")
    assert isinstance(dead, Failed)
    assert dead.text == GONE
    for name, text, seconds in values(left):
        assert name == "RankError"
        assert f"rank {size - 1} did not come within 1.5 s" in text
        assert WAIT <= seconds < BOUND


def test_a_rank_that_dies_in_the_midst_of_a_capture_is_missed_where_they_meet_next() -> None:
    left, dead = run_ranks(capture_with, 2, "dies in a capture")
    assert dead.text == GONE
    name, text, seconds = left
    assert name == "RankError"
    assert "rank 1 did not come within 1.5 s, where rank 0 was at the result of capturing batch sizes 4, 2" in text
    assert seconds < BOUND


def test_when_the_rank_that_holds_the_store_dies_the_others_say_so() -> None:
    dead, *left = run_ranks(capture_with, 3, "holds the store and dies")
    assert dead.text == GONE
    for name, text, seconds in values(left):
        assert name == "RankError"
        assert "lost the store of the process group" in text
        assert seconds < BOUND


def test_a_late_rank_gets_the_error_of_those_that_gave_up_on_it() -> None:
    for name, text, seconds in values(run_ranks(capture_with, 2, "is late")):
        assert name == "RankError"
        assert "rank 1 did not come within 1.5 s" in text
        assert seconds < BOUND


class BreakThatDies(InPlace):
    """A collective on either side of a break in which the last rank's process ends, once it is told to."""

    dies = False

    def forward(self, x: Tensor) -> Tensor:
        y = end_if(super().forward(x), self)
        dist.all_reduce(y)
        return y


@sg.eager_break
def end_if(y: Tensor, module: BreakThatDies) -> Tensor:
    if module.dies:
        os._exit(1)
    return y * 1


def die_in_a_replay(rank: int, size: int, where: str) -> list[tuple[str, str, float]]:
    module = (BreakThatDies if where == "in" else InPlace)(rank, size)
    mode = "PIECEWISE" if where == "in" else "FULL"
    model = sg.wrap(
        module.eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=WAIT), verify=0, progress=False, mode=mode
    )
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        if rank == size - 1:
            if where == "before":
                os._exit(1)
            module.dies = True
        found = [timed_error(lambda: model(batch(4))) for _ in range(2)]
        assert model.graph_stats.replays == 1  # what failed is not counted as one
    return [*found, timed_error(model.reset_graphs)]


@pytest.mark.parametrize(("where", "size"), [("before", 2), ("in", 2), ("in", 4)])
def test_a_rank_that_dies_before_or_in_a_replay_is_an_error_of_it_on_every_other(where: str, size: int) -> None:
    *left, dead = run_ranks(die_in_a_replay, size, where)
    assert dead.text == GONE
    for first, second, dropped in values(left):
        assert "nothing" not in (first[0], second[0])
        assert max(first[2], second[2]) < BOUND
        assert dropped[0] == "nothing"  # graphs can be given up without the rank that is gone


def destroy_everything(rank: int, size: int) -> list[tuple[str, str, float]]:
    model = sg.wrap(InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(), verify=0, progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        dist.destroy_process_group()
        calls = (lambda: model(batch(4)), lambda: model.capture_graphs(batch(3)), sg.RankGroup, model.reset_graphs)
        return [timed_error(call) for call in calls]


def test_when_all_groups_are_destroyed_under_live_graphs_every_rank_is_told_and_may_drop_them() -> None:
    for replay, capture, made, dropped in values(run_ranks(destroy_everything, 2)):
        assert {replay[0], capture[0]} == {"ReplayError"}
        assert made[0] == "ConfigError"
        assert dropped[0] == "nothing"


def destroy_the_group(rank: int, size: int) -> list[tuple[str, str, float]]:
    group = dist.new_group(list(range(size)))
    model = sg.wrap(
        InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(group), verify=0, progress=False
    )
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        dist.destroy_process_group(group)
        return [timed_error(lambda: model(batch(4))), timed_error(lambda: sg.RankGroup(group))]


def test_a_group_that_is_destroyed_under_live_graphs_is_named_on_every_rank() -> None:
    for replay, made in values(run_ranks(destroy_the_group, 2)):
        assert replay[0] == "ReplayError"
        assert "process group that the graphs' collectives belong to was destroyed" in replay[1]
        assert made[:2] == ("ConfigError", "the process group was destroyed; make a new one.")
