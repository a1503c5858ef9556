"""Which batches the decode kernel takes, and what a user without a GPU or Triton is told; the kernel is a stand-in."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import ConfigError, CudaGraphMode
from simplegraph.attention import SDPABackend, TritonDecodeBackend
from simplegraph.attention.selftest import AttentionEngine

CPU = torch.device("cpu")
LAYERS = 2


class Kernel(types.ModuleType):
    """Attends as the real one, request by request, and remembers what it was called with."""

    def __init__(self) -> None:
        super().__init__("simplegraph.attention.decode_kernel")
        self.calls: list[tuple[int, int]] = []  # requests and tokens of each

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
        **others: Any,
    ) -> None:
        self.calls.append((len(seq_lens), query_len))
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
    monkeypatch.setattr("simplegraph.attention.decode_kernel", stand_in, raising=False)
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
    monkeypatch.setattr("simplegraph.attention.triton_decode._multiprocessors", lambda device: 132)
    served = AttentionEngine(TritonDecodeBackend, CPU, num_heads=8, num_kv_heads=8, mode="NONE")
    backend: Any = served.backend
    assert [backend._num_splits(count) for count in (1, 2, 8, 16, 33, 64, 66, 67, 512)] == [32, 32, 8, 4, 2, 1, 1, 1, 1]


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
    with pytest.raises(ConfigError, match="pip install triton"):
        AttentionEngine(TritonDecodeBackend, CPU, mode="NONE")
