"""The log-sum-exp that backends give beside their output: what attention over other keys is merged by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simplegraph import BatchDescriptor, ConfigError, CudaGraphMode
from simplegraph.attention import BatchMetadata, PagedKVCache, SDPABackend, attending
from tests.support.reference_attention import reference_attention


def check_lse(make: Any, device: torch.device, dtype: torch.dtype, bound: float, **shape: int) -> None:
    """Output and log-sum-exp of requests of many lengths, beside float64."""
    heads, kv_heads, head_dim, page_size = (
        shape.get(name, default)
        for name, default in (("num_heads", 4), ("num_kv_heads", 2), ("head_dim", 16), ("page_size", 4))
    )
    lengths = [1, page_size, 2 * page_size + 3, 9 * page_size]
    pages = iter(range(1, 100))
    tables = [[next(pages) for _ in range(-(-length // page_size))] for length in lengths]
    cache = PagedKVCache(1, 100, page_size, kv_heads, head_dim, dtype=dtype, device=device)
    metadata = BatchMetadata(
        max_num_tokens=4, max_num_reqs=4, max_model_len=10 * page_size, page_size=page_size, device=device
    )
    backend = make(cache, metadata, num_heads=heads)
    with torch.inference_mode():
        cache._memory.normal_()
        q = torch.randn(4, heads, head_dim, dtype=dtype, device=device)
        out = torch.zeros_like(q)
        metadata.set([1] * 4, lengths, tables)
        with attending(backend, CudaGraphMode.NONE, BatchDescriptor(4, 4)):
            lse = backend.run_with_lse(0, q, out, backend.live)
        assert (lse.shape, lse.dtype) == ((4, heads), torch.float32)
        exact = reference_attention(q, cache, 0, [1] * 4, lengths, tables, backend.scale)
        torch.testing.assert_close(out.double(), exact, rtol=bound, atol=bound)
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            keys = cache.keys(0)[table].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, dim=1)
            scores = torch.einsum("hd,khd->kh", q[row].double(), keys) * backend.scale
            torch.testing.assert_close(lse[row].double(), scores.logsumexp(dim=0), rtol=1e-3, atol=1e-3)


def test_the_log_sum_exp_is_that_of_the_scores_to_the_base_e(device: torch.device) -> None:
    check_lse(SDPABackend, device, torch.float32, 1e-5)


def test_a_backend_without_it_says_what_it_is_for() -> None:
    class Plain(SDPABackend):
        support = SDPABackend.support
        name = "plain"
        run_with_lse = SDPABackend.__mro__[1].run_with_lse

    with pytest.raises(ConfigError, match="plain does not give the log-sum-exp by which context parallel ranks merge"):
        check_lse(Plain, torch.device("cpu"), torch.float32, 1e-5)
