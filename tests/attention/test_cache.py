"""The cache write, and attention over what others' pages hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from simplegraph import BatchDescriptor, ConfigError, CudaGraphManager, CudaGraphMode, InputError, SimpleGraphError
from simplegraph.attention import BatchMetadata, PagedKVCache, SDPABackend, attend, attending
from tests.support.reference_attention import reference_attention

FULL, NONE = CudaGraphMode.FULL, CudaGraphMode.NONE
Layout = Literal["NHD", "HND"]
layouts = pytest.mark.parametrize("layout", ["NHD", "HND"])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def build(device: torch.device, layout: Layout = "NHD", head_dim: int = 8) -> tuple[PagedKVCache, SDPABackend]:
    cache = PagedKVCache(2, 40, 4, 2, head_dim, dtype=torch.float32, device=device, layout=layout)
    metadata = BatchMetadata(max_num_tokens=32, max_num_reqs=8, max_model_len=24, page_size=4, device=device)
    return cache, SDPABackend(cache, metadata, num_heads=4)


def by_slot(cache: PagedKVCache, pages: Tensor) -> Tensor:
    """(num_slots, num_kv_heads, head_dim)."""
    return (pages if cache.layout == "NHD" else pages.transpose(1, 2)).flatten(0, 1)


@layouts
@pytest.mark.parametrize("head_dim", [8, 5])
def test_tokens_go_to_their_slots_and_nowhere_else(device: torch.device, layout: Layout, head_dim: int) -> None:
    cache, _ = build(device, layout, head_dim)
    for part in (cache.keys, cache.values):
        part(0).fill_(-7.0)
        part(1).fill_(-9.0)
    slots = torch.tensor([11, -1, 159, 0, -1, 64], device=device)
    fused = torch.randn(6, 8, head_dim, device=device)  # keys and values as slices of one tensor, as models have them
    k, v = fused[:, 4:6], fused[:, 6:8]
    cache.write(0, k, v, slots)
    for part, rows in ((cache.keys, k), (cache.values, v)):
        expected = torch.full((160, 2, head_dim), -7.0, device=device)
        expected[[11, 159, 0, 64]] = rows[[0, 2, 3, 5]]
        assert torch.equal(by_slot(cache, part(0)), expected)
        assert bool((part(1) == -9.0).all())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.zeros(3, 2, 8)}, "shape"),
        ({"v": torch.zeros(2, 1, 8)}, "shape"),
        ({"k": torch.zeros(2, 2, 8, dtype=torch.float16)}, "float16"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "shape"),
    ],
)
def test_rows_that_are_not_the_caches_are_refused(device: torch.device, change: dict[str, Tensor], words: str) -> None:
    cache, _ = build(device)
    rows: dict[str, Any] = {"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8), "slot_mapping": torch.tensor([1, 2])}
    with pytest.raises(InputError, match=words):
        cache.write(0, **{name: tensor.to(device) for name, tensor in (rows | change).items()})
    assert not cache.keys(0).any()


def test_a_write_under_grad_leaves_the_cache_without_a_history(device: torch.device) -> None:
    cache, _ = build(device)
    with torch.enable_grad():
        k = torch.randn(2, 2, 8, device=device, requires_grad=True)
        cache.write(0, k, k, torch.tensor([1, 2], device=device))
    assert not cache.keys(0).requires_grad


def test_a_cache_made_in_inference_mode_is_written_outside(device: torch.device) -> None:
    with torch.inference_mode():
        cache, _ = build(device)
    cache.write(0, *torch.ones(2, 1, 2, 8, device=device), torch.tensor([3], device=device))
    assert by_slot(cache, cache.keys(0))[3].tolist() == [[1.0] * 8] * 2


@layouts
def test_nan_in_what_a_request_may_not_see_is_not_seen(device: torch.device, layout: Layout) -> None:
    cache, backend = build(device, layout)
    queries, lengths, table = [1, 3], [6, 9], [[1, 2], [3, 4, 5]]
    for part in (cache.keys, cache.values):
        part(0).fill_(torch.nan)
    pairs = [(row[p // 4], p % 4) for row, n in zip(table, lengths, strict=True) for p in range(n)]
    slots = torch.tensor([page * 4 + place for page, place in pairs], device=device)
    cache.write(0, *torch.randn(2, len(slots), 2, 8, device=device), slots)
    backend.metadata.set(queries, lengths, table, num_tokens=8, num_reqs=4)
    q, k, v = (torch.randn(8, heads, 8, device=device) for heads in (4, 2, 2))
    with attending(backend, NONE, BatchDescriptor(8, 4)):
        out = attend(q, k, v, 0)
    expected = reference_attention(q[:4], cache, 0, queries, lengths, table, 8**-0.5)
    torch.testing.assert_close(out[:4].double(), expected, rtol=1e-4, atol=1e-5)
    assert bool(out.isfinite().all())


class Engine:
    """Full graphs of one layer."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        self.cache, self.backend = build(device)
        self.rows = [torch.randn(8, heads, 8, device=device) for heads in (4, 2, 2)]
        sizes = {"capture_sizes": [4, 8], "max_num_seqs": 8, "progress": False, "on_capture_failure": "raise"}
        self.manager = CudaGraphManager(device=device, **(sizes | settings))
        self.manager.add_hooks(self.backend)
        self.manager.capture(self.forward)

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        with attending(self.backend, mode, descriptor):
            q, k, v = (rows[: descriptor.num_tokens] for rows in self.rows)
            return attend(q, k, v, 0)


def test_a_step_whose_padded_shape_was_forgotten_does_not_write_other_requests_pages(device: torch.device) -> None:
    engine = Engine(device, mode="FULL")
    set_step = engine.backend.metadata.set
    set_step([1] * 8, [4] * 8, [[i + 1] for i in range(8)], num_tokens=8, num_reqs=8)
    engine.manager.run(engine.manager.dispatch(8, 8), engine.forward)
    before = engine.cache.keys(0).clone()
    engine.rows[1].add_(1)
    set_step([1] * 5, [5] * 5, [[i + 1, i + 20] for i in range(5)])
    with pytest.raises(SimpleGraphError, match="padded to 5 and 5"):
        engine.manager.run(engine.manager.dispatch(5, 5), engine.forward)
    assert torch.equal(engine.cache.keys(0), before)


def test_a_replay_without_a_step_since_the_capture_is_refused(device: torch.device) -> None:
    engine = Engine(device, mode="FULL")
    with pytest.raises(SimpleGraphError, match="no batch is set"):
        engine.manager.run(engine.manager.dispatch(8, 8), engine.forward)


def test_a_uniform_graph_refuses_a_mixed_batch(device: torch.device) -> None:
    engine = Engine(device, mode="FULL_DECODE_ONLY")
    engine.backend.metadata.set([3, 1], [3, 1], [[1], [2]], num_tokens=4, num_reqs=4)
    with pytest.raises(SimpleGraphError, match=r"requests of \[1, 3\]"):
        engine.manager.run(engine.manager.dispatch(4, 4, 1), engine.forward)


def test_support_is_declared_by_every_class_that_can_be_built() -> None:
    with pytest.raises(ConfigError, match="does not declare"):

        class Other(SDPABackend):
            """Inherits `run`, and must still say what it can do."""
