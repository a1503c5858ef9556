"""Two micro-batches in one graph: answers and cache of the undivided step, whatever lies around the cut."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import (
    BatchDescriptor,
    CaptureSizeError,
    ConfigError,
    CudaGraphMode,
    Dispatch,
    InputError,
    ReplayError,
)
from simplegraph.attention import (
    BatchMetadata,
    Mamba2Backend,
    PagedKVCache,
    SDPABackend,
    StateMetadata,
    TwoBatchOverlap,
    attend,
    recur,
    two_batch,
)
from simplegraph.manager.lifecycle import Event
from tests.attention.test_recurrent import StateEngine, run_steps
from tests.support.attention_engine import LAYERS, AttentionEngine, Requests
from tests.support.state_slots import check_continued

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL
EXACT = 1e-5


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Overlapped(AttentionEngine):
    """Splits its steps; a layer's collective would be launched before each `yield`."""

    def __init__(
        self, device: torch.device, *, make: Any = SDPABackend, sizes: Any = None, num_heads: int = 4, **settings: Any
    ) -> None:
        super().__init__(make, device, num_heads=num_heads, **settings)
        self.manager.hooks.clear()
        micro = [make(self.cache, self.new_metadata(), num_heads=num_heads) for _ in range(2)]
        self.overlap = TwoBatchOverlap(self.manager, self.backend, micro, sizes=sizes)
        self.ran: list[tuple[int, int]] = []  # first row and layer

    def new_metadata(self) -> BatchMetadata:
        whole = self.metadata
        limits = {
            name: getattr(whole, name) for name in ("max_num_tokens", "max_num_reqs", "max_model_len", "page_size")
        }
        return BatchMetadata(**limits, device=whole.device, window=whole.window)

    def capture(self) -> Any:
        return self.manager.capture(self.forward)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        if not self.overlap.split(mode, descriptor):
            return super().forward(mode, descriptor)
        halves = self.overlap.run(mode, descriptor, self.stages)
        return [torch.cat(both) for both in zip(*halves, strict=True)]

    def stages(self, rows: slice) -> two_batch.Stages:
        found = []
        for layer in range(LAYERS):
            found.append(attend(self.q[rows] * (layer + 1), self.k[rows], self.v[rows], layer))
            self.ran.append((rows.start, layer))
            yield
        return found

    def describe(self, requests: Requests, batch: Dispatch) -> None:
        self.overlap.set(batch, requests.query_lens, requests.seq_lens, [requests.block_table])


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_answers_and_cache_are_those_of_undivided_steps(device: torch.device, mode: str, window: int | None) -> None:
    """Padded, uniform and ragged batches; a cut within a request; a second half that is all padding."""
    served = Overlapped(device, mode=mode, capture_sizes=[1, 2, 4, 8, 15, 32], window=window)
    assert served.capture().failed == {}
    modes = {NONE: 0, PIECEWISE: 0, FULL: 0}
    for seed in range(24):
        requests = served.requests("mixed" if seed % 2 else "decode", 1 + seed % 8, seed)
        ran, error = served.step(requests, seed)
        assert error <= EXACT, requests
        modes[ran] += 1
    assert modes[FULL] >= 12
    assert served.overlap.chosen == {d for kind, d in served.manager.descriptors() if kind is FULL and d.num_tokens > 1}


def test_halves_take_turns_at_every_yield(device: torch.device) -> None:
    """So ranks launch collectives in one order, and one half computes while the other's are under way."""
    served = Overlapped(device, mode="FULL", capture_sizes=[8])
    served.capture()
    assert served.ran[:4] == [(0, 0), (4, 0), (0, 1), (4, 1)]
    assert len(served.ran) == 8  # the warmup, then the capture: replays run no Python


def test_uniform_decode_of_several_tokens(device: torch.device) -> None:
    served = Overlapped(device, mode="FULL_DECODE_ONLY", uniform_query_len=3, decode_capture_sizes=[6, 15, 24])
    served.capture()
    for seed, count in enumerate([1, 2, 3, 4, 5, 8]):
        ran, error = served.step(served.requests("decode", count, seed, query_len=3), seed)
        assert (ran, error <= EXACT) == (FULL, True)


def test_one_prompt_is_cut_in_two(device: torch.device) -> None:
    """The second half reads what the first wrote to the cache in the same graph; also across a page."""
    served = Overlapped(device, mode="FULL", capture_sizes=[9, 32])
    served.capture()
    pages = list(range(1, 13))
    for query, length in itertools.product([5, 6, 8, 9, 31], [31, 40]):
        ran, error = served.step(Requests([query], [length], [pages]), query)
        assert (ran, error <= EXACT) == (FULL, True)


def test_the_steps_of_a_graph_that_is_missing_run_eagerly_in_halves(device: torch.device) -> None:
    served = Overlapped(device, mode="FULL", capture_sizes=[4, 8])
    served.capture()
    served.manager.table.graphs.pop((FULL, BatchDescriptor(8, 8))).drop(Event.DROPPED)
    for count in (3, 7, 2):
        served.ran.clear()
        ran, error = served.step(served.requests("decode", count, count), count)
        assert (ran, error <= EXACT) == (FULL, True)
        assert bool(served.ran) == (count == 7)
    assert served.manager.stats.eager == {"not_captured_upfront": 1}


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_a_rank_without_requests_runs_a_step_of_padding(device: torch.device, mode: str) -> None:
    served = Overlapped(device, mode="FULL", capture_sizes=[4, 8])
    served.capture()
    served.step(served.requests("decode", 7, 1), 1)
    if mode == "NONE":
        served.manager.table.graphs.pop((FULL, BatchDescriptor(8, 8))).drop(Event.DROPPED)
    before, batch = served._pages().clone(), served.manager.dispatch(6, 6)
    served.overlap.set_dummy(batch)
    outputs = served.manager.run(batch, served.forward)
    assert all(output.isfinite().all() for output in outputs)
    assert torch.equal(served._pages(), before)
    assert served.step(served.requests("decode", 7, 2), 2)[1] <= EXACT


def test_a_replay_may_be_compared_with_eager(device: torch.device) -> None:
    served = Overlapped(device, mode="FULL", capture_sizes=[8])
    served.capture()
    served.fill(0)
    batch, requests = served.manager.dispatch(5, 5), served.requests("decode", 5, 0)
    served.describe(requests, batch)
    served.manager.run(batch, served.forward, verify=True, state=[served.cache._memory])
    (graph,) = served.manager.stats.graphs.values()
    assert graph.proof == "exact"
    assert served.step(requests, 0) == (FULL, pytest.approx(0, abs=EXACT))


def test_a_step_runs_once_and_only_if_it_was_set(device: torch.device) -> None:
    served = Overlapped(device, mode="FULL", capture_sizes=[8])
    served.capture()
    batch = served.manager.dispatch(6, 6)
    with pytest.raises(ReplayError, match="no batch is set"):
        served.manager.run(batch, served.forward)
    served.step(served.requests("decode", 6, 1), 1)
    before = served.cache._memory.clone()
    with pytest.raises(ReplayError, match="ran already"):
        served.manager.run(batch, served.forward)
    assert torch.equal(served.cache._memory, before)
    served.overlap.repeat()
    served.manager.run(batch, served.forward)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Requests([], [], []), "the batch is empty"),
        (Requests([1] * 5, [3] * 4, [[1]] * 4), "query_lens has 5 entries"),
        (Requests([1, 1, 0, 1, 1], [3] * 5, [[page] for page in range(1, 6)]), "has at least one token"),
        (Requests([1] * 5, [3] * 5, [[1], [2], [3], [4], [99]]), "99"),
        (Requests([1] * 5, [3] * 5, [[1], [2], [3], [4], [5]][:4]), "block_table"),
        (Requests([3] * 5, [3] * 5, [[page] for page in range(1, 6)]), "more than the"),
    ],
)
def test_a_wrong_step_is_refused_and_the_next_one_runs(device: torch.device, wrong: Requests, said: str) -> None:
    served = Overlapped(device, mode="FULL", capture_sizes=[8])
    served.capture()
    served.step(served.requests("decode", 6, 1), 1)
    before, batch = served.cache._memory.clone(), served.manager.dispatch(6, 6)
    with pytest.raises((InputError, CaptureSizeError), match=said):
        served.describe(wrong, batch)
    with pytest.raises(ReplayError):
        served.manager.run(batch, served.forward)
    assert torch.equal(served.cache._memory, before)
    assert served.step(served.requests("decode", 6, 2), 2)[1] <= EXACT


def test_only_the_shapes_that_are_named_are_split(device: torch.device) -> None:
    served = Overlapped(device, sizes=[16], mode="FULL", capture_sizes=[1, 4, 8, 16])
    assert served.capture().failed == {}
    assert served.overlap.chosen == {BatchDescriptor(16, 8)}
    for seed in range(12):
        ran, error = served.step(served.requests("mixed", 1 + seed % 8, seed), seed)
        assert error <= EXACT
        assert ran in (FULL, NONE)


def test_a_half_that_fails_leaves_nothing_under_way(device: torch.device) -> None:
    served = Overlapped(device, mode="FULL", capture_sizes=[4])
    closed = []

    def stages(rows: slice) -> two_batch.Stages:
        try:
            yield
            if rows.start:
                raise ValueError("no second half here")
            yield
        finally:
            closed.append(rows.start)

    served.stages = stages  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no second half here") as caught:
        served.capture()
    assert set(closed) == {0, 2}, caught  # though the error still holds its frames


def test_what_cannot_be_split_is_refused_when_it_is_made(device: torch.device) -> None:
    def build(micro: Any = None, mode: str = "FULL", **settings: Any) -> None:
        engine = AttentionEngine(SDPABackend, device, mode=mode)
        engine.manager.hooks.clear()
        fresh = functools.partial(SDPABackend, engine.cache, num_heads=4)
        limits = {"max_num_tokens": 32, "max_num_reqs": 8, "max_model_len": 48, "page_size": 4, "device": device}
        given = micro(engine, fresh, limits) if micro else [fresh(BatchMetadata(**limits)) for _ in range(2)]
        TwoBatchOverlap(engine.manager, engine.backend, given, **settings)

    def other_cache(engine: Any, fresh: Any, limits: Any) -> Any:
        cache = PagedKVCache(LAYERS, 64, 4, 2, 16, dtype=torch.float32, device=device)
        return [fresh(BatchMetadata(**limits)), SDPABackend(cache, BatchMetadata(**limits), num_heads=4)]

    build()
    with pytest.raises(ConfigError, match="mode is PIECEWISE"):
        build(mode="PIECEWISE")
    with pytest.raises(ConfigError, match="no full graph of 7 tokens can be split; sizes may have 2, 4, 8"):
        build(sizes=[4, 7])
    with pytest.raises(ConfigError, match="two backends share a metadata"):
        build(lambda engine, fresh, limits: [fresh(engine.metadata), fresh(BatchMetadata(**limits))])
    with pytest.raises(ConfigError, match="other caches"):
        build(other_cache)
    with pytest.raises(ConfigError, match=r"window of the backends is \[\[None\], \[None\], \[8\]\]"):
        build(lambda engine, fresh, limits: [fresh(BatchMetadata(**limits, window=window)) for window in (None, 8)])
    with pytest.raises(ConfigError, match="has 1 entries"):
        build(lambda engine, fresh, limits: [fresh(BatchMetadata(**limits))])


class OverlappedStates(StateEngine):
    """Splits the steps of recurrent layers; stands in place of its own metadata."""

    overlap: Any = None

    def __init__(self, device: torch.device, **settings: Any) -> None:
        super().__init__(device, **settings)
        self.manager.reset()
        self.manager.hooks.clear()
        self.whole, self.max_num_reqs, micro = self.metadata, self.metadata.max_num_reqs, []
        for _ in range(2):
            limits = {"max_num_tokens": 32, "max_num_reqs": self.max_num_reqs, "max_model_len": 10_000}
            made = StateMetadata(**limits, device=device)
            micro.append(Mamba2Backend(self.cache, made, shape=self.shape, weights=self.backend.weights))
        self.overlap = TwoBatchOverlap(self.manager, self.backend, micro)
        assert self.manager.capture(self.forward).failed == {}
        del vars(self.whole)["set"]
        self.metadata = self
        check_continued(self)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        if self.overlap is None or not self.overlap.split(mode, descriptor):
            return super().forward(mode, descriptor)
        halves = self.overlap.run(mode, descriptor, self.stages)
        return [torch.cat(both) for both in zip(*halves, strict=True)]

    def stages(self, rows: slice) -> two_batch.Stages:
        found = []
        for number, layer in enumerate((1, 3)):
            xbc, dt = self.xbc[number, rows], self.dt[number, rows]
            found.append(recur(layer, xbc, dt, out=xbc.new_zeros(len(xbc), 32)))
            yield
        return found

    def set(self, counts: list[int], lengths: list[int], slots: list[int], **padded: Any) -> None:
        batch = self.manager.dispatch(sum(counts), len(counts), 1 if sum(counts) == len(counts) else None)
        self.overlap.set(batch, counts, lengths, [slots])


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY"])
def test_states_of_recurrent_layers_pass_from_half_to_half(device: torch.device, mode: str) -> None:
    """A prompt's later tokens begin where the first half left its state; no other state is touched."""
    served = OverlappedStates(device, mode=mode, capture_sizes=[2, 5, 8, 16, 32])
    ran, error = run_steps(served, 24, [False, True])
    assert FULL in ran
    assert error <= EXACT


def test_a_state_slot_of_two_requests_is_found_also_across_the_halves(device: torch.device) -> None:
    served = OverlappedStates(device, mode="FULL_DECODE_ONLY", capture_sizes=[8])
    before = [tensor.clone() for tensor in served.cache.tensors]
    with pytest.raises(InputError, match="requests 1 and 6 both have state slot 2"):
        served.set([1] * 7, [3] * 7, [1, 2, 3, 4, 5, 6, 2])
    with pytest.raises(ReplayError):
        served.manager.run(served.manager.dispatch(7, 7, 1), served.forward)
    assert all(torch.equal(one, other) for one, other in zip(served.cache.tensors, before, strict=True))
    assert run_steps(served, 4, [True])[1] <= EXACT
