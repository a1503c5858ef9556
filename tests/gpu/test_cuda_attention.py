"""FlashInfer and FlashAttention inside graphs: captured once, right at any lengths, the cache exactly eager's.

FlashAttention-2 has tests of its own, and shares those that take no long time; `-k FA2` runs them all.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import AttentionCGSupport, BatchDescriptor, ConfigError, CudaGraphMode
from simplegraph.attention import (
    FlashAttentionBackend,
    FlashInferBackend,
    SDPABackend,
    TritonDecodeBackend,
    attend,
    attending,
)
from tests.attention.backends.test_lse import check_lse
from tests.gpu import attention_backends as backends
from tests.gpu.attention_backends import ERROR, FA2, FA3, OTHERS, needs_fa2, needs_fa3, needs_flashinfer
from tests.support.attention_engine import LAYERS, AttentionEngine, Requests
from tests.support.reference_attention import reference_attention

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE
BACKENDS = [*FA3, *OTHERS, pytest.param(TritonDecodeBackend, id="Triton")]
SHAPE = {"num_heads": 32, **backends.SHAPE}
pytestmark = pytest.mark.usefixtures("timed_inference")


def engine(make: Any, *, max_reqs: int, max_len: int = 4096, num_pages: int = 30_000, **settings: Any) -> Any:
    settings = {"max_tokens": settings.pop("max_tokens", max_reqs)} | settings
    return AttentionEngine(
        make, torch.device("cuda"), max_reqs=max_reqs, max_len=max_len, num_pages=num_pages, **SHAPE, **settings
    )


@pytest.mark.parametrize("make", [*FA2, *BACKENDS])
def test_the_log_sum_exp_is_that_of_the_scores_to_the_base_e(make: Any) -> None:
    shape = {name: SHAPE[name] for name in ("num_heads", "num_kv_heads", "head_dim", "page_size")}
    check_lse(make, torch.device("cuda", 0), torch.bfloat16, 2e-2, **shape)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("make", BACKENDS)
def test_decode_at_two_hundred_sets_of_lengths(make: Any, query_len: int) -> None:
    most = 512
    served = engine(
        make,
        max_reqs=most,
        max_tokens=most * query_len,
        mode="FULL_DECODE_ONLY",
        uniform_query_len=query_len,
        decode_capture_sizes=[query_len * count for count in (1, 2, 4, 8, 16, 48, 64, 128, 256, 384, 512)],
    )
    served.manager.capture(served.forward)
    errors = []
    for seed in range(200):
        count = [1, 2, 7, 8, 33, 64, 200, 511, 512][seed % 9]
        ran, error = served.step(served.requests("decode", count, seed, query_len), seed)
        assert ran is FULL
        errors.append(error)
    assert max(errors) <= ERROR, sorted(errors)[-5:]


@needs_fa3
def test_mixed_batches_in_full_graphs() -> None:
    served = engine(
        FlashAttentionBackend, max_reqs=64, max_tokens=1024, mode="FULL", capture_sizes=[16, 64, 256, 512, 1024]
    )
    served.manager.capture(served.forward)
    errors = []
    for seed in range(200):
        ran, error = served.step(served.requests("mixed", 1 + seed % 64, seed), seed)
        assert ran is FULL
        errors.append(error)
    assert max(errors) <= ERROR, sorted(errors)[-5:]


@pytest.mark.parametrize("make", [*FA2, *BACKENDS, pytest.param(SDPABackend, id="SDPA")])
def test_mixed_batches_between_segments_and_decode_in_full_graphs(make: Any) -> None:
    sizes = [16, 64, 256]
    small = {"max_len": 512, "num_pages": 2000, "capture_sizes": sizes}
    served = engine(make, max_reqs=16, max_tokens=256, mode="FULL_AND_PIECEWISE", **small)
    served.manager.capture(served.forward)
    seen = set()
    for seed in range(40):
        kind = "decode" if seed % 2 else "mixed"
        ran, error = served.step(served.requests(kind, 1 + seed % 16, seed), seed)
        assert error <= ERROR
        seen.add(ran)
    assert seen == {FULL, PIECEWISE}


@pytest.mark.parametrize("make", BACKENDS)
@pytest.mark.parametrize("max_reqs", [1, 2, 4, 8, 16, 24, 32, 40, 48, 100])
def test_any_limit_of_requests_is_captured_and_served_without_a_hang(make: Any, max_reqs: int) -> None:
    served = engine(make, max_reqs=max_reqs, max_len=256, num_pages=2000, mode="FULL_DECODE_ONLY")
    served.manager.capture(served.forward)
    for seed in range(4):
        _, error = served.step(served.requests("decode", max_reqs, seed), seed)
        assert error <= ERROR
    torch.cuda.synchronize()


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("make", [*FA2, *BACKENDS])
def test_a_rank_without_requests_replays_a_dummy_step(make: Any, query_len: int) -> None:
    """At sizes that FlashInfer splits, and that it does not."""
    settings = {"uniform_query_len": query_len, "decode_capture_sizes": [8 * query_len, 64 * query_len]}
    served = engine(make, max_reqs=64, max_tokens=256, max_len=256, mode="FULL_DECODE_ONLY", **settings)
    served.manager.capture(served.forward)
    for count in (8, 64, 8):
        served.step(served.requests("decode", count, count, query_len), count)
        cache = served.cache._memory.clone()
        served.metadata.set_dummy(count * query_len, count, query_len)
        batch = served.manager.dispatch(count * query_len, count, query_len)
        outputs = served.manager.run(batch, served.forward)
        assert batch.mode is FULL
        assert all(output.isfinite().all() for output in outputs)
        assert torch.equal(served.cache._memory, cache)


@needs_flashinfer
def test_all_sizes_of_flashinfer_share_one_integer_workspace() -> None:
    roomy = functools.partial(FlashInferBackend, workspace_bytes=256 << 20)
    served = engine(roomy, max_reqs=512, mode="FULL_DECODE_ONLY")
    before = torch.cuda.memory_allocated()
    served.manager.capture(served.forward)
    assert len(served.manager.programs) == 51
    assert served.backend._planner is not None  # else FlashInfer's own `plan` prepares every step, at twice the cost
    assert served.backend.int_workspace_bytes <= 16 << 20
    assert torch.cuda.memory_allocated() - before < 64 << 20


def microseconds(prepare: Callable[[], object], calls: int = 200) -> float:
    import time

    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        prepare()
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


@pytest.mark.parametrize("make", BACKENDS)
def test_preparing_a_step_waits_for_nothing(make: Any, record_property: Callable[[str, object], None]) -> None:
    served = engine(make, max_reqs=64, mode="FULL_DECODE_ONLY")
    served.manager.capture(served.forward)
    step = served.requests("decode", 64, 3)
    describe = functools.partial(served.metadata.set, step.query_lens, step.seq_lens, step.block_table)
    describe()
    descriptor = served.manager.dispatch(len(step.query_lens), len(step.query_lens), 1).descriptor

    def prepare() -> None:
        served.metadata.repeat()
        served.backend.before_replay(FULL, descriptor)

    figures = {"set_us": microseconds(describe), "prepare_us": microseconds(prepare)}
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)  # cycles, a fifth of a second
    describe()
    prepare()
    assert not torch.cuda.current_stream().query()  # still asleep
    print(served.backend.name, figures)
    for name, value in figures.items():
        record_property(name, value)


class PoisonedEngine(AttentionEngine):
    """An engine whose outputs lie in one buffer, which is filled with NaN before each step."""

    def __init__(self, make: Any, **settings: Any) -> None:
        super().__init__(make, torch.device("cuda"), **SHAPE, **settings)
        self.out = torch.stack([self.q] * LAYERS)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        rows = descriptor.num_tokens
        with attending(self.backend, mode, descriptor):
            for layer in range(LAYERS):
                q = self.q[:rows] * (layer + 1)
                attend(q, self.k[:rows], self.v[:rows], layer, out=self.out[layer, :rows])
        return list(self.out[:, :rows])

    def poisoned_step(self, requests: Requests, seed: int) -> tuple[CudaGraphMode, float]:
        """Run a step, and return its mode and the largest error of its rows against float64, relative to the whole."""
        self.fill(seed)
        self.out.fill_(torch.nan)
        tokens, lens = sum(requests.query_lens), set(requests.query_lens)
        batch = self.manager.dispatch(tokens, len(requests.query_lens), lens.pop() if len(lens) == 1 else None)
        self.describe(requests, batch)
        outputs = self.manager.run(batch, self.forward)
        errors = []
        for layer, output in enumerate(outputs):
            q, masks = self.q[:tokens] * (layer + 1), {"window": self.backend.window, "softcap": self.backend.softcap}
            exact = reference_attention(q, self.cache, layer, *requests, self.backend.scale, **masks)
            errors.append(float((output[:tokens].double() - exact).norm() / exact.norm()))
        return batch.mode, max(errors)


def spread(query_lens: list[int], seq_lens: list[int]) -> Requests:
    """Requests of these lengths, on pages that lie in no order."""
    pages = list(range(1, 400))
    random.Random(1).shuffle(pages)
    return Requests(query_lens, seq_lens, [[pages.pop() for _ in range(-(-length // 16))] for length in seq_lens])


@pytest.mark.parametrize("masks", [{}, {"window": 100, "softcap": 2.0}], ids=["plain", "masks"])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("make", [*FA2, *FA3])
def test_flash_attention_decodes_in_a_full_graph_at_lengths_of_1_to_511(
    make: Any, query_len: int, masks: dict[str, Any]
) -> None:
    """A capture is of a step with few tokens in the cache."""
    window, scores = masks.get("window"), {key: value for key, value in masks.items() if key == "softcap"}
    settings = {"max_reqs": 8, "max_tokens": 8 * query_len, "max_len": 512, "num_pages": 400, "window": window}
    settings |= {"decode_capture_sizes": [query_len, 8 * query_len], "uniform_query_len": query_len}
    served = PoisonedEngine(functools.partial(make, **scores), mode="FULL_DECODE_ONLY", **settings)
    served.manager.capture(served.forward)
    lengths = [*range(query_len, 131), *range(131, 512, 19), 255, 256, 257, 383, 384, 385, 510, 511]
    random.Random(3).shuffle(lengths)
    for seed in range(0, len(lengths), 8):
        seq_lens = lengths[seed : seed + 8]
        ran, error = served.poisoned_step(spread([query_len] * len(seq_lens), seq_lens), seed)
        assert ran is FULL
        assert error <= ERROR, seq_lens


@pytest.mark.parametrize("make", [*FA2, *FA3])
def test_flash_attention_prefills_beside_decodes(make: Any) -> None:
    """In full graphs by version 3. Version 2 runs them in the breaks of a piecewise graph."""
    settings = {"max_reqs": 8, "max_tokens": 512, "max_len": 512, "num_pages": 400, "capture_sizes": [16, 128, 512]}
    served = PoisonedEngine(make, mode="FULL", **settings)
    served.manager.capture(served.forward)
    expected = {AttentionCGSupport.ALWAYS: FULL, AttentionCGSupport.UNIFORM_BATCH: PIECEWISE}[served.backend.support]
    for seed, (query_lens, seq_lens) in enumerate(
        [
            ([300], [300]),
            ([1, 129, 7, 64], [511, 129, 200, 64]),
            ([16, 1, 1, 3], [16, 1, 400, 511]),
            ([65, 2], [65, 66]),
            ([511, 1], [511, 511]),
            ([2, 3], [2, 3]),
        ]
    ):
        ran, error = served.poisoned_step(spread(query_lens, seq_lens), seed)
        assert ran is expected
        assert error <= ERROR, query_lens


@needs_fa2
@pytest.mark.parametrize(("most", "is_right"), [(1, False), (4, True)])
def test_what_a_graph_of_FA2_reads_of_query_lengths(most: int, is_right: bool) -> None:
    """Captured for one token a request, its kernel reads none; for more, it reads them.

    So uniform batches are what every graph of it can hold. A graph for mixed batches would be right, but decodes in it
    would have neither split keys nor heads that are taken for tokens.
    """
    served = AttentionEngine(
        functools.partial(FlashAttentionBackend, version=2),
        torch.device("cuda"),
        **SHAPE,
        **{"max_reqs": 4, "max_tokens": 4, "max_len": 256, "num_pages": 100, "mode": "NONE"},
    )
    served.fill(1)
    flash: Any = served.backend._flash
    starts = torch.arange(5, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([40, 100, 7, 90], dtype=torch.int32, device="cuda")
    table = torch.arange(1, 65, dtype=torch.int32, device="cuda").view(4, 16)
    out = torch.zeros_like(served.q)

    def call() -> None:
        flash.flash_attn_varlen_func(
            served.q,
            served.cache.keys(0),
            served.cache.values(0),
            **{"cu_seqlens_q": starts, "seqused_k": lengths, "max_seqlen_q": most, "max_seqlen_k": 256},
            **{"block_table": table, "softmax_scale": served.backend.scale, "causal": True, "out": out},
            fa_version=2,
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    tables = table.tolist()
    for query_lens in ([1, 1, 1, 1], [2, 0, 1, 1]):
        ends = torch.tensor(query_lens, device="cuda").cumsum(0)
        starts[1:].copy_(ends)
        out.fill_(torch.nan)
        graph.replay()
        real = [row for row, count in enumerate(query_lens) if count]
        step = [query_lens[row] for row in real], [int(lengths[row]) for row in real], [tables[row] for row in real]
        exact = reference_attention(served.q, served.cache, 0, *step, served.backend.scale)
        error = float((out.double() - exact).norm() / exact.norm())
        assert (error <= ERROR) == (is_right or query_lens == [1, 1, 1, 1]), (query_lens, error)


def test_support_is_what_each_backend_can_do() -> None:
    assert FlashAttentionBackend.support is AttentionCGSupport.ALWAYS
    assert FlashInferBackend.support is AttentionCGSupport.UNIFORM_BATCH
    assert TritonDecodeBackend.support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("make", [FlashAttentionBackend, FlashInferBackend, TritonDecodeBackend])
def test_a_cache_on_the_cpu_is_refused_where_there_is_a_gpu(make: Any) -> None:
    settings: dict[str, Any] = {"max_reqs": 4, "max_len": 64, "num_pages": 20, "max_tokens": 4, "mode": "NONE"}
    with pytest.raises(ConfigError):
        AttentionEngine(make, torch.device("cpu"), **SHAPE, **settings)


@pytest.mark.parametrize("make", [*FA2, *FA3])
@pytest.mark.parametrize("changes", [{"dtype": torch.float32}, {"layout": "HND"}])
def test_a_cache_that_flash_attention_cannot_read_is_refused(changes: dict[str, Any], make: Any) -> None:
    settings: dict[str, Any] = {"max_reqs": 4, "max_len": 64, "num_pages": 20, "max_tokens": 4, "mode": "NONE"}
    with pytest.raises(ConfigError, match="FlashAttention"):
        AttentionEngine(make, torch.device("cuda"), **(SHAPE | changes | settings))


@pytest.mark.parametrize("query_len", [1, 2, 6, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float16, "layout": "HND"},
        {"head_dim": 64, "page_size": 32},
        {"head_dim": 80, "num_heads": 12, "num_kv_heads": 12},
        {"head_dim": 256, "num_heads": 12, "num_kv_heads": 4},
    ],
    ids=str,
)
def test_the_decode_kernel_reads_any_cache(changes: dict[str, Any], query_len: int) -> None:
    """Few and many requests, so that sequences are split into parts and are not."""
    served = AttentionEngine(
        TritonDecodeBackend,
        torch.device("cuda"),
        max_reqs=64,
        max_len=3000,
        num_pages=6000,
        max_tokens=64 * query_len,
        mode="FULL_DECODE_ONLY",
        uniform_query_len=query_len,
        decode_capture_sizes=[query_len * count for count in (1, 3, 8, 64)],
        **(SHAPE | changes),
    )
    served.manager.capture(served.forward)
    allowed = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: ERROR}[served.cache.dtype]
    for seed in range(24):
        ran, error = served.step(served.requests("decode", [1, 3, 7, 64][seed % 4], seed, query_len), seed)
        assert ran is FULL
        assert error <= allowed


def test_sequences_of_the_decode_kernel_are_put_together_alike_every_time() -> None:
    """Parts arrive in any order; what they are added up in is theirs."""
    served = engine(TritonDecodeBackend, max_reqs=2, mode="FULL_DECODE_ONLY")
    served.manager.capture(served.forward)
    served.fill(1)
    table = [list(range(1, 257)), list(range(257, 513))]
    results = []
    for _ in range(200):
        served.metadata.set([1, 1], [4096, 3500], table)
        results.append([out.clone() for out in served.manager.run(served.manager.dispatch(2, 2, 1), served.forward)])
    assert all(torch.equal(one, first) for found in results for one, first in zip(found, results[0], strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_cache_on_another_gpu_than_the_current_one() -> None:
    served = AttentionEngine(
        TritonDecodeBackend, torch.device("cuda", 1), max_reqs=8, max_len=256, num_pages=200, mode="NONE", **SHAPE
    )
    assert torch.cuda.current_device() == 0
    for seed in range(4):
        for kind in ("decode", "mixed"):
            _, error = served.step(served.requests(kind, 1 + seed, seed), seed)
            assert error <= ERROR
