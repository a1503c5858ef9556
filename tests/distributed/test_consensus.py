"""Data and expert parallel ranks run every step in one mode and one size, also those with nothing to run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import bench.host_overhead.consensus
import simplegraph as sg
from simplegraph.attention import BatchMetadata, PagedKVCache, SDPABackend, attend, attending
from simplegraph.distributed.ranks import Vote
from tests.distributed.launch import run_ranks, values

NONE, PIECEWISE, FULL = sg.CudaGraphMode.NONE, sg.CudaGraphMode.PIECEWISE, sg.CudaGraphMode.FULL


def agree(rank: int, size: int, votes: list[list[tuple[str, int, int]]]) -> list[tuple[str, int, int]]:
    consensus = sg.ShapeConsensus(timeout=20)
    found = [consensus.agree(Vote(sg.CudaGraphMode[mode], *rest)) for mode, *rest in (step[rank] for step in votes)]
    return [(vote.mode.name, vote.num_tokens, vote.num_active_loras) for vote in found]


@pytest.mark.parametrize("size", [2, 4])
def test_the_lowest_mode_wins_and_sizes_go_to_the_maximum(size: int) -> None:
    others = [("FULL", 1, 0)] * (size - 2)
    steps = [
        [("FULL", 8, 0), ("FULL", 4, 2), *others],
        [("FULL", 8, 0), ("PIECEWISE", 16, 0), *others],
        [("NONE", 100, 0), ("PIECEWISE", 16, 0), *others],
        [("FULL", 0, 0), ("FULL", 4, 0), *others],
    ]
    expected = [("FULL", 8, 2), ("PIECEWISE", 16, 0), ("NONE", 100, 0), ("FULL", 4, 0)]
    assert values(run_ranks(agree, size, steps)) == [expected] * size


def alone(rank: int, size: int) -> tuple[Vote, float]:
    consensus, vote = sg.ShapeConsensus(), Vote(FULL, 8)
    found = consensus.agree(vote)
    dist.all_reduce = None  # type: ignore[assignment]  # whoever calls it now fails
    began = time.perf_counter()
    for _ in range(10_000):
        consensus.agree(vote)
    return found, (time.perf_counter() - began) / 10_000


def test_one_rank_asks_nobody() -> None:
    ((found, seconds),) = values(run_ranks(alone, 1))
    assert found == Vote(FULL, 8)
    assert seconds < 5e-6


def vote_and_die(rank: int, size: int) -> tuple[str, str, float]:
    consensus = sg.ShapeConsensus(timeout=2.0)
    consensus.agree(Vote(FULL, 8))
    if rank == size - 1:
        os._exit(1)
    began = time.monotonic()
    try:
        consensus.agree(Vote(FULL, 8))
    except sg.RankError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", 0.0


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_dies_is_an_error_of_the_step_on_every_other(size: int) -> None:
    for name, text, seconds in values(run_ranks(vote_and_die, size)[:-1]):
        assert name == "RankError"
        assert "found no agreement on a step of 8 tokens" in text
        assert seconds < 10


@pytest.mark.skipif((os.cpu_count() or 1) < 8, reason="a time, on too few cores to tell")
def test_a_step_costs_no_more_than_150_us_at_two_ranks_of_one_host_and_nothing_at_one() -> None:
    assert bench.host_overhead.consensus.measure(2)["median_us"] <= 150
    assert bench.host_overhead.consensus.measure(1)["median_us"] <= 5


def test_the_benchmark_of_a_step_gives_figures_for_every_number_of_ranks(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "consensus.json"
    bench.host_overhead.consensus.main(["--sizes", "1,2", "--steps", "50", "--device", "cpu", "--json", str(out)])
    results = json.loads(out.read_text())["results"]
    assert 0 < results["1"]["median_us"] < results["2"]["median_us"] <= results["2"]["p99_us"]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["ranks", "-----", "1", "2"]


HEADS, DIM, EXPERTS = 2, 8, 4


class Engine:
    """An expert parallel decoder layer as data parallel engines run it: all ranks' tokens meet in one all-gather."""

    def __init__(self, rank: int, size: int, mode: str) -> None:
        self.rank, self.size = rank, size
        self.cache = PagedKVCache(1, 33, 4, HEADS, DIM, dtype=torch.float32, device="cpu")
        self.metadata = BatchMetadata(max_num_tokens=16, max_num_reqs=16, max_model_len=64, page_size=4, device="cpu")
        self.backend = SDPABackend(self.cache, self.metadata, num_heads=HEADS)
        self.manager = sg.CudaGraphManager(
            device="cpu",
            mode=mode,
            support=self.backend.support,
            capture_sizes=[2, 4, 8],
            max_num_seqs=8,
            max_num_tokens=16,
            progress=False,
            ranks=sg.RankGroup(timeout=20),
            consensus=sg.ShapeConsensus(timeout=20),
        )
        self.manager.add_hooks(self.backend)
        self.x = torch.zeros(16, HEADS, DIM)
        self.expert = torch.full((HEADS, DIM), float(rank + 1))  # each rank's own

    def forward(self, mode: sg.CudaGraphMode, descriptor: sg.BatchDescriptor) -> torch.Tensor:
        x = self.x[: descriptor.num_tokens]
        with attending(self.backend, mode, descriptor):
            hidden = attend(x, x, x, layer=0)
        parts = [torch.empty_like(hidden) for _ in range(self.size)]
        dist.all_gather(parts, hidden)
        everyone = torch.cat(parts) * self.expert  # this rank's expert, for the tokens of all
        dist.all_reduce(everyone)
        return everyone[self.rank * len(hidden) : (self.rank + 1) * len(hidden)]

    def step(self, tokens: int, seed: int) -> tuple[str, int, torch.Tensor]:
        """One decode step of as many requests as tokens; none runs a batch of padding."""
        batch = self.manager.dispatch(tokens, tokens, 1) if tokens else self.manager.dispatch(0)
        padded = batch.descriptor
        if tokens:
            self.metadata.set(
                [1] * tokens,
                [1] * tokens,
                [[1 + request] for request in range(tokens)],
                num_tokens=padded.num_tokens,
                num_reqs=padded.num_reqs,
            )
        else:
            self.metadata.set_dummy(padded.num_tokens, padded.num_reqs, padded.uniform_query_len)
        self.x.zero_()
        self.x[:tokens] = torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed + self.rank))
        return batch.mode.name, padded.num_tokens, self.manager.run(batch, self.forward)[:tokens].clone()


def serve(rank: int, size: int, mode: str, steps: list[list[int]]) -> tuple[list[Any], dict[str, Any]]:
    engine = Engine(rank, size, mode)
    with torch.inference_mode():
        engine.manager.capture(engine.forward)
        found = [engine.step(step[rank], 100 * index) for index, step in enumerate(steps)]
    return found, engine.manager.report().to_dict()


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_batches_of_other_sizes_and_idle_ones_run_one_graph_and_get_their_own_answer(
    size: int, mode: str
) -> None:
    steps = [[step[rank % 2] for rank in range(size)] for step in ([3, 1], [8, 0], [0, 2], [4, 4], [9, 1], [1, 1])]
    shapes = [max(step) for step in steps] if mode == "NONE" else [4, 8, 2, 4, 9, 2]
    factor = sum(range(1, size + 1))  # all experts together; attention over one token is that token
    for rank, (found, stats) in enumerate(values(run_ranks(serve, size, mode, steps))):
        for index, (step, padded, (used, tokens, y)) in enumerate(zip(steps, shapes, found, strict=True)):
            expected = torch.randn(step[rank], HEADS, DIM, generator=torch.Generator().manual_seed(100 * index + rank))
            torch.testing.assert_close(y, expected * factor)
            assert used == ("NONE" if mode == "NONE" or padded == 9 else "FULL")
            assert tokens == padded
        assert stats["replays"] == (0 if mode == "NONE" else 5)


class OneOfTheEnginesOwn:
    """An exchange that an engine brings: here it has heard that another rank runs 8 tokens eagerly."""

    def agree(self, vote: Vote) -> Vote:
        return Vote(NONE, max(8, vote.num_tokens), vote.num_active_loras)


def test_an_engine_may_bring_its_own_consensus() -> None:
    manager = sg.CudaGraphManager(device="cpu", capture_sizes=[2, 8], consensus=OneOfTheEnginesOwn(), progress=False)
    x = torch.arange(8.0)
    manager.capture(lambda mode, descriptor: x[: descriptor.num_tokens] * 2)
    batch = manager.dispatch(2)
    assert (batch.mode, batch.descriptor.num_tokens, batch.padding) == (NONE, 8, 6)
    assert torch.equal(manager.run(batch, lambda mode, descriptor: x[: descriptor.num_tokens] * 2), x * 2)
    assert manager.report().to_dict()["eager"] == {"other_ranks": 1}


class SingleRank:
    def agree(self, vote: Vote) -> Vote:
        return vote


def test_a_rank_without_the_graph_keeps_the_others_from_replaying_it() -> None:
    manager = sg.CudaGraphManager(device="cpu", capture_sizes=[2, 4], consensus=SingleRank(), progress=False)
    x = torch.arange(4.0)

    def forward(mode: sg.CudaGraphMode, descriptor: sg.BatchDescriptor) -> torch.Tensor:
        return x[: descriptor.num_tokens] * (2 if descriptor.num_tokens == 4 else x.sum().item())

    assert manager.dispatch(3).mode is NONE  # nothing is captured yet
    assert list(manager.capture(forward).failed) == ["batch size 2"]
    assert manager.dispatch(3)[:2] == (FULL, sg.BatchDescriptor(4))
    failed = manager.dispatch(1)
    assert (failed.mode, failed.descriptor.num_tokens, failed.reason) == (NONE, 2, sg.Reason.CAPTURE_FAILED)


def test_agreeing_ranks_must_be_allowed_to_pad() -> None:
    with pytest.raises(sg.ConfigError, match="padding is False"):
        sg.CudaGraphManager(device="cpu", capture_sizes=[2], padding=False, consensus=OneOfTheEnginesOwn())
