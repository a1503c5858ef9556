"""Batches that the decode kernel takes, and errors without a GPU or Triton; the kernel is a stand-in."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import (
    AttentionCGSupport,
    BatchDescriptor,
    ConfigError,
    CudaGraphMode,
    InputError,
)
from simplegraph.attention import BatchMetadata, ContextShare, PagedKVCache, SDPABackend, TritonDecodeBackend
from tests.support.attention_engine import AttentionEngine

CPU = torch.device("cpu")
LAYERS = 2


class Kernel(types.ModuleType):
    """Attends as the real one, request by request, and remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__("simplegraph.attention.kernels.decode")
        self.calls: list[tuple[int, int]] = []  # requests and tokens of each
        self.with_lse: set[bool] = set()
        self.strides: list[tuple[int, ...]] = []  # of the queries

    @staticmethod
    def part_size(rows: int, head_dim: int) -> int:
        return rows * head_dim

    def decode(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        *,
        query_len: int,
        scale: float,
        lse: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.calls.append((len(seq_lens), query_len))
        self.with_lse.add(lse is not None)
        self.strides.append(q.stride())
        group = q.shape[1] // keys.shape[2]
        heads = torch.arange(q.shape[1]) // group
        token = torch.arange(query_len)
        places = torch.arange(block_table.shape[1] * keys.shape[1])
        for request, length in enumerate(seq_lens):
            rows = slice(request * query_len, (request + 1) * query_len)
            seen = places < (length - query_len + 1 + token[:, None]).clamp(min=1)
            key, value = (
                pages[block_table[request]].flatten(0, 1)[:, heads].transpose(0, 1) for pages in (keys, values)
            )
            value = torch.where(seen.any(0)[None, :, None], value, 0)
            scores = (q[rows].transpose(0, 1) @ key.transpose(1, 2)) * scale
            weights = torch.where(seen, scores, -torch.inf).softmax(-1)
            out[rows] = (weights @ value).transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    found, stand_in = importlib.util.find_spec, Kernel()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else found(name))
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr("simplegraph.attention.kernels.decode", stand_in, raising=False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with torch.inference_mode():
        yield stand_in


def test_decode_goes_to_the_kernel_and_mixed_batches_to_the_other_backend(kernel: Kernel) -> None:
    served = AttentionEngine(TritonDecodeBackend, CPU, mode="FULL_AND_PIECEWISE", capture_sizes=[4, 8, 32])
    assert isinstance(served.backend, TritonDecodeBackend)
    assert isinstance(served.backend.mixed, SDPABackend)
    served.manager.capture(served.forward)
    modes = set()
    for seed in range(12):
        kind = "decode" if seed % 2 else "mixed"
        requests = served.requests(kind, 1 + seed % 8, seed)
        kernel.calls.clear()
        mode, error = served.step(requests, seed)
        assert error < 1e-5
        modes.add(mode)
        if kind == "mixed" and len(set(requests.query_lens)) > 1:
            assert kernel.calls == []
    assert modes == {CudaGraphMode.FULL, CudaGraphMode.PIECEWISE}


@pytest.mark.parametrize(("query_len", "taken"), [(1, True), (8, True), (32, True), (33, False)])
def test_the_kernel_takes_up_to_64_rows_of_queries(kernel: Kernel, query_len: int, taken: bool) -> None:
    """Two query heads share a key head here."""
    served = AttentionEngine(TritonDecodeBackend, CPU, mode="NONE", max_tokens=80)
    for count in (1, 2):
        _, error = served.step(served.requests("decode", count, count, query_len), count)
        assert error < 1e-5
    expected = [(1, query_len)] * LAYERS + [(2, query_len)] * LAYERS
    assert kernel.calls == (expected if taken else [])


def test_the_number_of_parts_follows_from_the_shape(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("simplegraph.attention.backends.triton_decode._multiprocessors", lambda device: 132)
    served = AttentionEngine(TritonDecodeBackend, CPU, num_heads=8, num_kv_heads=8, mode="NONE")
    backend: Any = served.backend
    assert [backend._num_splits(count) for count in (1, 2, 8, 16, 33, 64, 66, 67, 512)] == [32, 32, 8, 4, 2, 1, 1, 1, 1]


class OnTheHost(SDPABackend):
    support = AttentionCGSupport.NEVER
    name = "on the host"
    reads_lengths_on_device = False


@pytest.mark.parametrize(("num_heads", "on_device"), [(64, True), (65, False)])
def test_steps_follow_each_other_in_a_graph_only_if_the_kernel_takes_them(
    kernel: Kernel, num_heads: int, on_device: bool
) -> None:
    """Else the other backend does, which may have planned for the first of them."""
    shape = {"num_heads": num_heads, "num_kv_heads": 1}
    make = functools.partial(TritonDecodeBackend, mixed=OnTheHost)
    assert AttentionEngine(make, CPU, mode="NONE", **shape).backend.reads_lengths_on_device is on_device


def test_a_full_graph_of_more_rows_than_the_kernel_takes_needs_the_other_backend(kernel: Kernel) -> None:
    settings: dict[str, Any] = {
        "capture_sizes": [66],
        "uniform_query_len": 33,
        "max_tokens": 80,
        "mode": "FULL_DECODE_ONLY",
    }
    served = AttentionEngine(functools.partial(TritonDecodeBackend, mixed=OnTheHost), CPU, **settings)
    with pytest.raises(
        ConfigError, match=r"query_len=33 and 2 query heads per key head .* on the host cannot be in it"
    ):
        served.manager.capture(served.forward)
    served = AttentionEngine(functools.partial(TritonDecodeBackend, mixed=SDPABackend), CPU, **settings)
    served.manager.capture(served.forward)
    mode, error = served.step(served.requests("decode", 2, 0, 33), 0)
    assert mode is CudaGraphMode.FULL
    assert error < 1e-5
    assert kernel.calls == []


@pytest.mark.parametrize(("size", "with_lse"), [(1, False), (2, True)])
def test_what_a_capture_will_launch_is_loaded_before_it(kernel: Kernel, size: int, with_lse: bool) -> None:
    """Ranks that share a context launch another variant, with the log-sum-exp."""
    cache = PagedKVCache(1, 8, 4, 2, 16, dtype=torch.float32, device=CPU)
    metadata = BatchMetadata(
        max_num_tokens=4, max_num_reqs=4, max_model_len=32, page_size=4, device=CPU, share=ContextShare(0, size)
    )
    backend = TritonDecodeBackend(cache, metadata, num_heads=4)
    backend.before_capture(CudaGraphMode.FULL, BatchDescriptor(4, 4, 1))
    assert kernel.calls == [(4, 1)]
    assert kernel.with_lse == {with_lse}


def test_heads_whose_elements_do_not_follow_each_other_are_copied_or_refused(kernel: Kernel) -> None:
    """The kernel would read and write the elements between them."""
    served = AttentionEngine(TritonDecodeBackend, CPU, mode="NONE")
    view = served.metadata.set([1], [3], [[1]])
    backend: Any = served.backend
    backend.prepare(CudaGraphMode.NONE, BatchDescriptor(1, 1), view)
    crossed, out = torch.randn(1, 16, 4).transpose(1, 2), torch.zeros(1, 4, 16)
    backend.run(0, crossed, out, view)
    assert kernel.strides == [(64, 16, 1)]
    with pytest.raises(InputError, match=r"out has strides \(64, 1, 4\)"):
        backend.run(0, out, crossed, view)
    assert len(kernel.calls) == 1


def test_a_cache_of_a_dtype_that_the_kernel_does_not_take_is_refused(kernel: Kernel) -> None:
    with pytest.raises(ConfigError, match=r"the cache is of torch.float64; .*torch.bfloat16"):
        AttentionEngine(TritonDecodeBackend, CPU, mode="NONE", dtype=torch.float64)


def test_a_backend_for_mixed_batches_that_cannot_be_made_is_said(kernel: Kernel) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise ConfigError("not here")

    with pytest.raises(ConfigError, match="not here"):
        AttentionEngine(lambda *a, **k: TritonDecodeBackend(*a, mixed=refuse, **k), CPU, mode="NONE")


def test_a_cache_on_the_cpu_is_refused(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="the cache is on cpu"):
        AttentionEngine(TritonDecodeBackend, CPU, mode="NONE")


def test_without_triton_the_line_to_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="the cache is on cpu"):  # where it would not help
        AttentionEngine(TritonDecodeBackend, CPU, mode="NONE")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="pip install triton"):
        AttentionEngine(TritonDecodeBackend, CPU, mode="NONE")
