"""Ranks that share the keys and values of every sequence give the attention over the whole of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph.attention import (
    AttentionBackend,
    BatchMetadata,
    ContextParallelBackend,
    ContextShare,
    PagedKVCache,
    SDPABackend,
)
from tests.distributed.launch import run_ranks, values
from tests.distributed.sharing import SharingEngine, serve

SIZES = {"capture_sizes": [2, 4, 8]}


@pytest.mark.parametrize("shard_heads", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_captured_once_it_is_right_at_any_lengths_also_where_a_rank_holds_nothing(size: int, shard_heads: bool) -> None:
    settings = {**SIZES, "shard_heads": shard_heads, "num_heads": 8}
    for seen, error, replays in values(run_ranks(serve, size, SDPABackend, "cpu", 20, settings)):
        assert (seen, replays) == ({"FULL"}, 21)
        assert error < 1e-5


@pytest.mark.parametrize("mode", ["PIECEWISE", "NONE"])
def test_between_graphs_and_without_them_it_is_the_same(mode: str) -> None:
    for seen, error, replays in values(run_ranks(serve, 2, SDPABackend, "cpu", 8, {**SIZES, "mode": mode})):
        assert (seen, replays) == ({mode}, 9 if mode == "PIECEWISE" else 0)
        assert error < 1e-5


def prompt(rank: int, size: int) -> list[float]:
    with torch.inference_mode():
        engine = SharingEngine(SDPABackend, "cpu", **SIZES)
        engine.manager.capture(engine.forward)
        # Eight tokens of one prompt, after 30 that are in the cache: each sees those before it and itself.
        table = engine.pages([40], 1)[0]
        return [engine.step(list(range(31, 39)), 5, [table] * 8)[1], engine.step(list(range(1, 9)), 6, [table] * 8)[1]]


def test_a_prompts_tokens_run_as_requests_that_see_what_is_before_them() -> None:
    for errors in values(run_ranks(prompt, 2)):
        assert max(errors) < 1e-5


def metadata(**changes: Any) -> BatchMetadata:
    settings = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 32, "page_size": 4, "device": "cpu"}
    return BatchMetadata(**settings | changes)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_shares_of_all_ranks_are_every_token_once(size: int) -> None:
    lengths, tables = [1, 2, 7, 30], [[1], [2], [3, 4], [5, 6, 7, 8, 9, 10, 11, 12]]
    views = [metadata(share=ContextShare(rank, size)).set([1] * 4, lengths, tables) for rank in range(size)]
    assert sum(view.seq_lens for view in views).tolist() == lengths
    for token in range(4):
        (slot,) = [int(view.slot_mapping[token]) for view in views if view.slot_mapping[token] >= 0]
        last = lengths[token] - 1
        assert slot == tables[token][last // (4 * size)] * 4 + last % (4 * size) // size
    assert [view.batch.seq_lens.tolist() for view in views] == [view.seq_lens.tolist() for view in views]


def test_a_sequence_needs_as_many_times_fewer_pages_as_there_are_ranks() -> None:
    shared = metadata(share=ContextShare(1, 4))
    assert (shared.max_blocks, metadata().max_blocks) == (2, 8)
    with pytest.raises(sg.InputError, match="needs 2 pages of 16 tokens"):
        shared.set([1], [17], [[1]])


def test_dummy_steps_hold_something_on_every_rank_and_fit_into_its_pages() -> None:
    for rank in range(4):
        shared = metadata(share=ContextShare(rank, 4))
        assert shared.set_dummy(4, 4, 1).seq_lens.tolist() == [1] * 4
        assert shared.set_dummy(8, 1).seq_lens.tolist() == [2]


def test_what_cannot_be_shared_is_refused_in_words() -> None:
    shared = metadata(share=ContextShare(0, 2))
    with pytest.raises(sg.InputError, match=r"query_lens\[1\] is 3; context parallel ranks take one token per request"):
        shared.set([1, 3], [5, 9], [[1], [2, 3]])
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(sg.ConfigError, match="expected a rank from 0 to size - 1"):
            metadata(share=ContextShare(rank, size))
    with pytest.raises(sg.ConfigError, match="not initialised"):
        ContextParallelBackend(SDPABackend(cache(), metadata(), num_heads=4))


def cache(kv_heads: int = 2) -> PagedKVCache:
    return PagedKVCache(1, 16, 4, kv_heads, 8, dtype=torch.float32, device="cpu")


class WithoutLse(AttentionBackend):
    support = sg.AttentionCGSupport.ALWAYS
    name = "without lse"

    def run(self, *args: Any) -> None: ...


class NeverInGraphs(SDPABackend):
    support = sg.AttentionCGSupport.NEVER
    name = "never"


def refused(rank: int, size: int) -> list[str]:
    share = ContextShare(rank, size)

    def other_ranks() -> None:
        ContextParallelBackend(SDPABackend(cache(), metadata(share=ContextShare(0, 4)), num_heads=4))

    def uneven_heads() -> None:
        backend = SDPABackend(cache(1), metadata(share=share), num_heads=3)
        ContextParallelBackend(backend, shard_heads=True)

    def no_graphs() -> None:
        ContextParallelBackend(NeverInGraphs(cache(), metadata(share=share), num_heads=4))

    def no_lse() -> None:
        SharingEngine(WithoutLse, "cpu", mode="NONE").step([3], 0)

    texts = []
    for call in (other_ranks, uneven_heads, no_graphs, no_lse):
        try:
            call()
            texts.append("nothing")
        except sg.ConfigError as error:
            texts.append(str(error))
    return texts


def test_ranks_and_backends_that_do_not_fit_are_refused_on_every_rank() -> None:
    for rank, (other, heads, graphs, lse) in enumerate(values(run_ranks(refused, 2))):
        assert f"share=ContextShare({rank}, 2)" in other
        assert "2 ranks do not divide num_heads=3" in heads
        assert "never cannot be in a full graph" in graphs
        assert "without lse does not give the log-sum-exp" in lse
