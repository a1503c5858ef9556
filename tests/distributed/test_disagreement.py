"""Ranks that fail, disagree or move weights alone get the same error, on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.distributed.launch import run_ranks, values
from tests.distributed.models import (
    BOUND,
    SIZES,
    WAIT,
    FailsOnOneRank,
    InPlace,
    batch,
    capture_with,
    expected,
    timed_error,
)


def fail_on_one_rank(rank: int, size: int, capture: bool, on_failure: str) -> dict[str, Any]:
    ranks = sg.RankGroup(timeout=30)
    model = sg.wrap(
        FailsOnOneRank(rank, size).eval(),
        capture_sizes=SIZES,
        ranks=ranks,
        verify=0,
        progress=False,
        on_capture_failure=on_failure,
    )
    error = None
    with torch.inference_mode():
        try:
            if capture:
                model.capture_graphs(batch(3))
            else:
                for _ in range(4):
                    model(batch(2))
        except sg.CaptureError as caught:
            error = str(caught)
        found = {rows: model(batch(rows)).clone() for rows in ((4, 2, 3, 1) if on_failure == "eager" else (4,))}
    return {"found": found, "error": error, "stats": model.graph_report().to_dict()}


@pytest.mark.parametrize("size", [2, 4])
def test_a_size_that_fails_on_one_rank_runs_eagerly_on_all_and_every_rank_says_why(size: int) -> None:
    for rank, told in enumerate(values(run_ranks(fail_on_one_rank, size, True, "eager"))):
        for rows, y in told["found"].items():
            torch.testing.assert_close(y, expected(rows) * 2, rtol=1e-5, atol=1e-5)
        stats = told["stats"]
        assert (stats["captures"], stats["replays"], stats["eager"]) == (1, 2, {"capture_failed": 2}), stats
        ((label, failure),) = stats["failures"].items()
        assert label == "batch size 2"
        assert "no graph of two rows here" in failure
        assert ("on rank 1" in failure) == (rank != 1)


@pytest.mark.parametrize("capture", [True, False])
def test_a_failed_capture_raises_on_every_rank_where_failures_raise(capture: bool) -> None:
    for told in values(run_ranks(fail_on_one_rank, 2, capture, "raise")):
        assert "no graph of two rows here" in told["error"]
        torch.testing.assert_close(told["found"][4], expected(4) * 2, rtol=1e-5, atol=1e-5)


def test_ranks_with_other_settings_all_get_the_same_error_that_names_them() -> None:
    results = values(run_ranks(capture_with, 4, "other settings"))
    assert {(name, text) for name, text, _ in results} == {
        (
            "ConfigError",
            "ranks differ in capture_sizes: rank 0 has (2, 4), rank 3 has (2, 8). Graphs with collectives must be "
            "captured alike; give every rank the same settings.",
        )
    }
    assert max(seconds for *_, seconds in results) < BOUND


def test_what_one_rank_raises_ends_the_capture_on_all_at_once() -> None:
    first, last = values(run_ranks(capture_with, 2, "raises"))
    assert first[0] == "RankError"
    assert "rank 1 left with" in first[1]
    assert last[:2] == ("InputError", "no graph of two rows here")
    assert first[2] < WAIT


class Independent(nn.Module):
    """No collective in eager code, so that ranks with other batches get as far as the capture."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def call_with_other_sizes(rank: int, size: int) -> tuple[str, str, float]:
    ranks = sg.RankGroup(timeout=WAIT)
    model = sg.wrap(Independent().eval(), capture_sizes=SIZES, ranks=ranks, verify=0, progress=False)

    def call() -> None:
        for _ in range(4):
            model(batch(2 + 2 * rank))

    with torch.inference_mode():
        return timed_error(call)


def test_ranks_that_capture_for_batches_of_other_sizes_are_all_told() -> None:
    for name, text, seconds in values(run_ranks(call_with_other_sizes, 2)):
        assert name == "RankError"
        assert "rank 0 has batch size 2, rank 1 has batch size 4" in text
        assert seconds < WAIT


def replay_with_other_sizes(rank: int, size: int, eager: bool) -> tuple[str, str, float]:
    ranks = sg.RankGroup(timeout=WAIT)
    model = sg.wrap(Independent().eval(), capture_sizes=SIZES, verify=0, progress=False, debug=True)
    model.use_ranks(ranks)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        model(batch(4))
        if eager and rank == 1:
            time.sleep(2 * WAIT)  # as in a collective that no other rank joins
            return "nothing", "", 0.0
        return timed_error(lambda: model(batch(2 + 2 * rank)))


def test_with_debug_ranks_that_replay_other_sizes_are_all_told() -> None:
    for name, text, seconds in values(run_ranks(replay_with_other_sizes, 2, False)):
        assert name == "RankError"
        assert "rank 0 at a FULL replay of 2 tokens; rank 1 at a FULL replay of 4 tokens" in text
        assert seconds < WAIT


def test_with_debug_a_rank_that_replays_alone_is_told_who_is_missing() -> None:
    (name, text, seconds), _ = values(run_ranks(replay_with_other_sizes, 2, True))
    assert name == "RankError"
    assert "rank 1 did not come within 1.5 s, where rank 0 was at a FULL replay of 2 tokens" in text
    assert seconds < BOUND


def move_a_weight(rank: int, size: int, everywhere: bool) -> tuple[tuple[str, str, float], Tensor, dict[str, Any]]:
    module = Independent() if not everywhere else InPlace(rank, size)
    module.weight = nn.Parameter(torch.ones(1), requires_grad=False)
    ranks = sg.RankGroup(timeout=WAIT)
    model = sg.wrap(module.eval(), capture_sizes=SIZES, ranks=ranks, verify=0, progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(3))
        if everywhere:
            module.down.data = module.down.data * 3
        elif rank == 1:
            module.weight.data = torch.ones(1)
        told = timed_error(lambda: [model(batch(4)) for _ in range(4)])
        found = model(batch(4)).clone() if everywhere else batch(4)
        return told, found, model.graph_report().to_dict()


def test_weights_moved_on_all_ranks_are_captured_anew_by_all() -> None:
    for told, y, stats in values(run_ranks(move_a_weight, 2, True)):
        assert told[0] == "nothing", told
        torch.testing.assert_close(y, expected(4) * 6, rtol=1e-5, atol=1e-5)
        assert stats["recaptures"] == 1


def test_a_weight_moved_on_one_rank_alone_is_an_error_there() -> None:
    first, second = values(run_ranks(move_a_weight, 2, False))
    assert first[0][0] == "nothing"
    assert second[0][0] == "RankError"
    assert "rank 0 did not come" in second[0][1]
    assert "dropping graphs" in second[0][1]
    assert second[0][2] < BOUND
