"""Attention in float64, one request at a time: the reference of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from simplegraph.attention.cache import PagedKVCache


def reference_attention(
    q: Tensor,
    cache: PagedKVCache,
    layer: int,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Sequence[Sequence[int]],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention over a paged cache that already holds the step's keys and values.

    Args:
        q: (sum(query_lens), num_heads, head_dim).
        cache: keys and values.
        layer: index of the cache's layer.
        query_lens: tokens of each request in this step.
        seq_lens: tokens of each request in the cache.
        block_table: page ids of each request.
        scale: factor on the scores.
        window: keys that a token sees, its own included; None for all before it.
        softcap: bound of the scores; None for no bound.
        sinks: (num_heads,), one more score for each head, without a value; None for none.

    Returns:
        (sum(query_lens), num_heads, head_dim) float64.
    """
    results, start = [], 0
    for query, length, blocks in zip(query_lens, seq_lens, block_table, strict=True):
        pages = torch.as_tensor(blocks[: -(-length // cache.page_size)], device=q.device, dtype=torch.int64)
        keys, values = (_tokens(part[pages], cache.layout, length) for part in (cache.keys(layer), cache.values(layer)))
        groups = q.shape[1] // cache.num_kv_heads
        rows = q[start : start + query].double().transpose(0, 1)
        seen = torch.ones(query, length, dtype=torch.bool, device=q.device).tril(length - query)
        if window is not None:
            seen = seen.triu(length - query - window + 1)
        # Keys that no token sees may be another request's, or NaN.
        keys, values = (part.where(seen.any(0)[None, :, None], 0) for part in (keys, values))
        scores = rows @ keys.repeat_interleave(groups, 0).transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, query, 1)
            scores = torch.cat((column, scores), -1)
        weights = scores.softmax(-1)[..., -length:]
        results.append((weights @ values.repeat_interleave(groups, 0)).transpose(0, 1))
        start += query
    return torch.cat(results)


def _tokens(pages: Tensor, layout: str, length: int) -> Tensor:
    """Return a request's first tokens: (num_kv_heads, length, head_dim) float64."""
    rows = pages if layout == "NHD" else pages.transpose(1, 2)
    return rows.flatten(0, 1)[:length].double().transpose(0, 1)
