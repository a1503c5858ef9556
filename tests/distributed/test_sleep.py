"""Ranks sleep and wake together: what fails on one of them is done on none."""

from __future__ import annotations

from typing import Any

import torch

import simplegraph as sg
from simplegraph.sleeping.emulated import EmulatedRegion
from tests.distributed.launch import run_ranks, values
from tests.distributed.models import SIZES, InPlace, batch, expected


def raises(call: Any) -> str:
    try:
        call()
    except sg.AsleepError as error:
        return str(error)
    return ""


def fails_on_rank_1(rank: int, size: int) -> dict[str, Any]:
    def no_host_memory(self: object, size: int) -> None:
        raise sg.AsleepError("no host memory here")

    with sg.sleepable(device="cpu"):
        model = sg.wrap(
            InPlace(rank, size).eval(), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=30), verify=0, progress=False
        )
    host_buffer, map_block, errors = EmulatedRegion.host_buffer, EmulatedRegion.map, []
    with torch.inference_mode():
        model.capture_graphs(batch(4))
        if rank == 1:
            EmulatedRegion.host_buffer = no_host_memory
        errors.append(raises(model.sleep))
        EmulatedRegion.host_buffer = host_buffer
        awake = model(batch(2)).clone()
        report = model.sleep()
        if rank == 1:
            EmulatedRegion.map = lambda self, block: False
        errors += [raises(model.wake), raises(lambda: model(batch(2)))]
        EmulatedRegion.map = map_block
        model.wake()
        woken = model(batch(2)).clone()
    stats = model.graph_stats
    counts = stats.captures, stats.replays, stats.recaptures
    return {"errors": errors, "answers": (awake, woken), "size": report.given_back, "counts": counts}


def test_what_fails_on_one_rank_is_done_on_none_and_works_later() -> None:
    for rank, told in enumerate(values(run_ranks(fails_on_rank_1, 2))):
        sleep, wake, call = told["errors"]
        assert "no host memory here" in sleep
        assert ("failed on rank 1" in sleep) == ("failed on rank 1" in wake) == (rank != 1)
        assert "waking needs" in wake
        assert "is asleep (weights, graphs)" in call
        for answer in told["answers"]:
            torch.testing.assert_close(answer, expected(2) * 2, rtol=1e-5, atol=1e-5)
        assert told["size"] > 0
        assert told["counts"] == (2, 2, 0)
