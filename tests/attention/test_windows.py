"""Windows, soft caps and sinks: right in every mode beside float64, and pages before a window are never read."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import AttentionCGSupport, BatchDescriptor, ConfigError, CudaGraphMode, InputError, ReplayError
from simplegraph.attention import (
    AttentionBackend,
    BackendGroup,
    BatchMetadata,
    ContextParallelBackend,
    ContextShare,
    PagedKVCache,
    SDPABackend,
    attend,
    attending,
)
from tests.support.attention_engine import AttentionEngine, Requests
from tests.support.reference_attention import reference_attention

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL
PAGE = 4
EXACT = 1e-5


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Windowed(AttentionEngine):
    """Gives pages before a window back: their ids are nonsense in the table, and every page of nobody holds NaN."""

    lost: list[int]

    def give_back(self, requests: Requests) -> Requests:
        """Return the requests without the pages of which no token of the step sees a key."""
        window = self.metadata.window or self.metadata.max_model_len
        tables, size = [], self.cache.page_size
        for query, length, table in zip(*requests, strict=True):
            gone = max(0, length - query - (window - 1)) // size
            tables.append([[-1, 10**6, 2**31 - 1][column % 3] for column in range(gone)] + table[gone:])
        return Requests(requests.query_lens, requests.seq_lens, tables)

    def run_step(self, requests: Requests, seed: int) -> tuple[CudaGraphMode, float]:
        requests = self.give_back(requests)
        owned = {page for table in requests.block_table for page in table} | {0}  # padding reads page 0
        self.lost = [page for page in range(self.cache.num_pages) if page not in owned]
        return self.step(requests, seed)

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self.cache._memory[:, :, self.lost] = torch.nan

    def _pages(self) -> Tensor:
        return super()._pages().nan_to_num(7.0)

    def _error(self, requests: Requests, output: Tensor, layer: int) -> float:
        tables = [[min(page, self.cache.num_pages - 1) for page in table] for table in requests.block_table]
        return super()._error(requests._replace(block_table=tables), output, layer)


def sinks(heads: int, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[int, Tensor]:
    """Different for each layer and head, some above and some below the scores."""
    values = torch.linspace(-3, 4, 2 * heads, device=device).view(2, heads).to(dtype)
    return dict(enumerate(values))


def gpt_oss(device: torch.device, heads: int = 4) -> Any:
    return functools.partial(SDPABackend, sinks=sinks(heads, device))


KINDS: dict[str, Any] = {
    "mistral": lambda device: SDPABackend,
    "gemma2": lambda device: functools.partial(SDPABackend, softcap=1.5, scale=0.4),
    "gpt_oss": gpt_oss,
}


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_float64s_and_pages_given_back_are_not_read(device: torch.device, kind: str, mode: str) -> None:
    served = Windowed(KINDS[kind](device), device, window=6, mode=mode, capture_sizes=[4, 8, 32])
    served.manager.capture(served.forward)
    ran = set()
    for seed in range(16):
        requests = served.requests("mixed" if seed % 2 else "decode", 1 + seed % 8, seed)
        found, error = served.run_step(requests, seed)
        assert error <= EXACT, requests
        ran.add(found)
    assert ran == {CudaGraphMode[mode]}


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 7, 8, 9, 48, 10**10])
def test_lengths_around_the_borders_of_window_and_page(device: torch.device, window: int) -> None:
    """Windows below a page, of a page and of all keys; one and several tokens of each request; padding rows."""
    served = Windowed(gpt_oss(device), device, window=window, mode="FULL", capture_sizes=[8, 32], num_pages=128)
    served.manager.capture(served.forward)
    near = {length for base in (1, min(window, 40), PAGE, 2 * PAGE) for length in range(base, base + 3)}
    pages = itertools.count(1)
    for query in (1, 3, 5):
        pages = itertools.count(1)
        lengths = [length for length in sorted(near | {47}) if length >= query][:6]
        tables = [[next(pages) for _ in range(-(-length // PAGE))] for length in lengths]
        ran, error = served.run_step(Requests([query] * len(lengths), lengths, tables), query)
        assert ran is FULL
        assert error <= EXACT


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_prompt_in_chunks_gives_what_it_gives_at_once(device: torch.device, layout: str) -> None:
    """Every chunk reads what earlier ones wrote, in pages that are given back behind the window."""
    length, window = 30, 7
    served = Windowed(SDPABackend, device, window=window, mode="PIECEWISE", capture_sizes=[8, 32], layout=layout)
    served.manager.capture(served.forward)
    q, k, v = (torch.randn(length, heads, 16, device=device) for heads in (4, 2, 2))
    served.lost = list(range(1, 64))
    served.fill(0)
    table, free, outputs = list(range(1, 9)), list(range(40, 63)), []
    start = 0
    for count in (5, 1, 8, 3, 8, 4, 1):
        gone = max(0, start - (window - 1)) // PAGE
        for column in range(gone):
            served.cache._memory[:, :, table[column]] = torch.nan  # it is another request's now
            table[column] = free[0]
        for own, rows in ((served.q, q), (served.k, k), (served.v, v)):
            own[:count] = rows[start : start + count]
        batch = served.manager.dispatch(count, 1)
        served.metadata.set([count], [start + count], [table], num_tokens=batch.descriptor.num_tokens, num_reqs=1)
        outputs.append(served.manager.run(batch, served.forward)[0][:count].clone())
        start += count
    whole = PagedKVCache(1, 9, PAGE, 2, 16, dtype=torch.float32, device=device)
    whole.write(0, k, v, torch.arange(PAGE, PAGE + length, device=device))
    exact = reference_attention(q, whole, 0, [length], [length], [list(range(1, 9))], 0.25, window=window)
    torch.testing.assert_close(torch.cat(outputs).double(), exact, rtol=EXACT, atol=EXACT)


def test_the_reference_is_the_sum_that_the_words_say(device: torch.device) -> None:
    """Written out once for one token: window, soft cap and sink."""
    cache = PagedKVCache(1, 3, PAGE, 1, 8, dtype=torch.float64, device=device)
    cache._memory.normal_()
    q = torch.randn(1, 1, 8, dtype=torch.float64, device=device)
    keys, values = (part(0)[[1, 2]].flatten(0, 2)[3:7] for part in (cache.keys, cache.values))  # of 7 tokens the last 4
    last = torch.full((1,), 0.7, dtype=torch.float64, device=device)
    scores = torch.cat([2.0 * torch.tanh(keys @ q[0, 0] * 0.3 / 2.0), last])
    expected = (scores.exp() / scores.exp().sum())[:4] @ values
    found = reference_attention(q, cache, 0, [1], [7], [[1, 2]], 0.3, window=4, softcap=2.0, sinks=last.float())
    torch.testing.assert_close(found[0, 0], expected)


def test_the_buffers_begin_with_the_first_page_that_a_token_sees(device: torch.device) -> None:
    built = BatchMetadata(
        max_num_tokens=8, max_num_reqs=4, max_model_len=64, page_size=4, device=device, num_pages=20, window=5
    )
    assert (built.max_seq_len, built.max_blocks) == (15, 4)  # 4 before the token, 8 of the step, 3 of a page
    dead = [-1, 99]
    view = built.set([1, 3, 2], [14, 12, 2], [[*dead, 5, 6], [*dead[:1], 8, 9], [7]], num_tokens=8, num_reqs=4)
    assert view.seq_lens.tolist() == [6, 8, 2, 0]
    assert view.block_table.tolist() == [[5, 6, 0, 0], [8, 9, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
    assert view.slot_mapping.tolist() == [25, 37, 38, 39, 28, 29, -1, -1]  # as without a window
    with pytest.raises(InputError, match=r"block_table\[0\]\[2\] is 99; expected a page id from 0 to 19"):
        built.set([1], [14], [[3, 4, 99, 6]])


@pytest.mark.parametrize("window", [0, -3, 2.5, True])
def test_a_window_that_is_no_count_is_refused(device: torch.device, window: Any) -> None:
    with pytest.raises(ConfigError, match=r"window is .*; expected a whole number of at least 1"):
        BatchMetadata(max_num_tokens=8, max_num_reqs=4, max_model_len=64, page_size=4, device=device, window=window)


def test_steps_that_the_device_derives_are_refused_with_a_window(device: torch.device) -> None:
    limits: dict[str, Any] = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 64, "page_size": 4}
    built = BatchMetadata(**limits, device=device, window=5)
    with pytest.raises(InputError, match="a window cannot advance a step; expected ahead=0"):
        built.set(1, [3], [[1, 2]], ahead=2)
    built.set(1, [3], [[1]])
    for derive in (lambda: built.advance([4]), lambda: built.follow(built.batch, 1, 0)):
        with pytest.raises(InputError, match="a window cannot advance a step"):
            derive()
    with pytest.raises(ConfigError, match="2 context parallel ranks with window=5"):
        BatchMetadata(**limits, device=device, window=5, share=ContextShare(0, 2))


class Plain(SDPABackend):
    """Declares no features, and inherits none."""

    support = AttentionCGSupport.ALWAYS
    name = "plain"


@pytest.mark.parametrize(
    ("window", "options", "words"),
    [
        (5, {}, "plain has no window"),
        (None, {"softcap": 30.0}, "plain has no softcap"),
        (None, {"sinks": {0: torch.zeros(4), 1: torch.zeros(4)}}, "plain has no sinks"),
    ],
)
def test_a_backend_refuses_what_it_does_not_declare(
    device: torch.device, window: int | None, options: dict[str, Any], words: str
) -> None:
    make = functools.partial(Plain, **options)
    with pytest.raises(ConfigError, match=words):
        AttentionEngine(make, device, window=window, mode="NONE")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": 0.0}, "softcap is 0.0; expected a number above 0"),
        ({"softcap": float("inf")}, "softcap is inf"),
        ({"sinks": {0: 4}}, "sinks of layer 1 are missing"),
        ({"sinks": {0: 4, 1: 3}}, r"sinks of layer 1 are \(3,\) on (cpu|cuda:0); expected \(4,\)"),
    ],
)
def test_caps_and_sinks_that_cannot_be_are_refused(device: torch.device, options: dict[str, Any], words: str) -> None:
    if "sinks" in options:
        options = {"sinks": {layer: torch.zeros(heads, device=device) for layer, heads in options["sinks"].items()}}
    with pytest.raises(ConfigError, match=words):
        AttentionEngine(functools.partial(SDPABackend, **options), device, mode="NONE")


class TwoGroups:
    """Layers 0 and 2 see a window of 5 keys, layer 1 all, from caches and block tables of their own."""

    WINDOWS = (5, None, 5)

    def __init__(self, device: torch.device, page_sizes: tuple[int, int] = (4, 4), **settings: Any) -> None:
        from simplegraph import CudaGraphManager

        self.backends: dict[int | None, AttentionBackend] = {}
        rows: dict[str, Any] = {"dtype": torch.float32, "device": device}
        for window, size in zip((5, None), page_sizes, strict=True):
            layers = [layer for layer, own in enumerate(self.WINDOWS) if own == window]
            cache = PagedKVCache(len(layers), 40, size, 2, 16, layers=layers, **rows)
            metadata = BatchMetadata(
                max_num_tokens=8, max_num_reqs=8, max_model_len=48, page_size=size, device=device, window=window
            )
            self.backends[window] = SDPABackend(cache, metadata, num_heads=4)
        self.group = BackendGroup({layer: self.backends[window] for layer, window in enumerate(self.WINDOWS)})
        self.q, self.k, self.v = (torch.randn(8, heads, 16, **rows) for heads in (4, 2, 2))
        self.manager = CudaGraphManager(
            device=device,
            support=self.group.support,
            capture_sizes=[4, 8],
            max_num_seqs=8,
            max_num_tokens=8,
            **settings,
        )
        self.manager.add_hooks(self.group)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        rows = descriptor.num_tokens
        with attending(self.group, mode, descriptor):
            return [attend(self.q[:rows] * (layer + 1), self.k[:rows], self.v[:rows], layer) for layer in range(3)]


@pytest.mark.parametrize("page_sizes", [(4, 4), (4, 16)])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_each_group_has_its_own_pages_and_block_table(
    device: torch.device, mode: str, page_sizes: tuple[int, int]
) -> None:
    """Pages of the groups may differ in size too: nothing that one reads is the other's."""
    served = TwoGroups(device, page_sizes, mode=mode)
    served.manager.capture(served.forward)
    for backend in served.backends.values():
        backend.cache._memory.normal_()
    lengths = [3, 13, 22]
    tables: dict[int | None, list[list[int]]] = {}
    for window, backend in served.backends.items():
        pages = itertools.count(1 if window else 7)
        tables[window] = [[next(pages) for _ in range(-(-length // backend.cache.page_size))] for length in lengths]
    batch = served.manager.dispatch(3, 3, 1)
    reqs = batch.descriptor.num_reqs if batch.mode is FULL else 3
    for window, backend in served.backends.items():
        backend.metadata.set(1, lengths, tables[window], num_tokens=batch.descriptor.num_tokens, num_reqs=reqs)
    outputs = served.manager.run(batch, served.forward)
    assert batch.mode is CudaGraphMode[mode]
    for layer, window in enumerate(served.WINDOWS):
        cache, q = served.backends[window].cache, served.q[:3] * (layer + 1)
        exact = reference_attention(q, cache, layer, [1] * 3, lengths, tables[window], 0.25, window=window)
        torch.testing.assert_close(outputs[layer][:3].double(), exact, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_groups_that_are_set_to_different_steps_are_refused(device: torch.device, mode: str) -> None:
    served = TwoGroups(device, mode=mode)
    served.manager.capture(served.forward)
    batch = served.manager.dispatch(2, 2, 1)
    padded = {"num_tokens": batch.descriptor.num_tokens, "num_reqs": batch.descriptor.num_reqs}
    served.backends[5].metadata.set(1, [3, 3], [[1], [2]], **padded)
    served.backends[None].metadata.set(1, [3], [[1]], **padded)
    before = [backend.cache._memory.clone() for backend in served.backends.values()]
    with pytest.raises(ReplayError, match="set to 2 requests and 2 tokens, another to 1 and 1; set every one"):
        served.manager.run(batch, served.forward)
    assert all(torch.equal(b.cache._memory, old) for b, old in zip(served.backends.values(), before, strict=True))


def test_a_cache_of_some_layers_takes_them_by_their_index_in_the_model(device: torch.device) -> None:
    served = TwoGroups(device, mode="NONE")
    cache = served.backends[5].cache
    assert list(cache.layers) == [0, 2]
    cache.write(2, served.k[:1], served.v[:1], torch.tensor([6], device=device))
    assert torch.equal(cache.keys(2)[1, 2], served.k[0])
    assert not cache.keys(0).any()
    served.backends[5].metadata.set(1, [1], [[1]])
    entered = attending(served.backends[5], NONE, BatchDescriptor(1, 1))
    with entered, pytest.raises(InputError, match="layer is 1; the cache has layers 0, 2"):
        attend(served.q[:1], served.k[:1], served.v[:1], 1)
    for layers in ([0, 0], [1]):
        with pytest.raises(ConfigError, match="expected the different indices of 2 layers"):
            PagedKVCache(2, 4, 4, 2, 16, dtype=torch.float32, device=device, layers=layers)


def test_context_parallel_ranks_refuse_sinks(device: torch.device) -> None:
    served = AttentionEngine(gpt_oss(device), device, mode="NONE")
    backend: Any = served.backend
    with pytest.raises(ConfigError, match="the backend has sinks"):
        ContextParallelBackend(backend)
