"""Mixed prefill-decode batches: the Llama on steps whose requests have one token or many.

Attention's metadata of the requests changes in shape from step to step, and the longest query is a
Python number, so none of it is passed to the forward: it is in a context that attention, an eager
break, reads at every call. The forward's own inputs are per token, and may be padded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models.attention import flash_attention, run_flash, write_cache
from bench.models.llama import Attention, Llama
from simplegraph import eager_break


@dataclasses.dataclass(frozen=True)
class AttentionMetadata:
    """The requests of one step, with their tokens one after the other.

    Args:
        slots: (num_tokens,) int64, where each token's key and value go: page * page_size + offset.
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin.
        seq_lens: (num_reqs,) int32, tokens in each request's cache, this step's included.
        block_table: (num_reqs, max_blocks) int32, page ids; 0 after a request's last page.
        query_lens, seq_lens_host: tokens of this step, and in the cache, as Python numbers.
    """

    slots: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    num_tokens: int = dataclasses.field(init=False)
    max_query_len: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(self.query_lens))
        object.__setattr__(self, "max_query_len", max(self.query_lens))


_metadata: AttentionMetadata | None = None


@contextlib.contextmanager
def for_requests(metadata: AttentionMetadata) -> Iterator[None]:
    """Set the requests for calls of a `MixedLlama` in this context, eager or replayed."""
    global _metadata
    before, _metadata = _metadata, metadata
    try:
        yield
    finally:
        _metadata = before


@eager_break
def mixed_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: Attention) -> None:
    """Write this step's keys and values to the layer's cache, then attend, causally within each request.

    Args:
        q: (T, num_heads, head_dim); rows after the step's tokens are padding.
        k, v: (T, num_kv_heads, head_dim).
        out: (T, num_heads, head_dim); written, padding with zeros.
        layer: the layer, which has the cache.

    Raises:
        RuntimeError: called outside `for_requests`, or the requests have more tokens than `q` has rows.
    """
    step = _metadata
    if step is None or step.num_tokens > q.shape[0]:
        raise RuntimeError(_complaint(step, q.shape[0]))
    live = slice(step.num_tokens)
    write_cache(k[live], v[live], layer.k_cache, layer.v_cache, step.slots)
    flash = flash_attention(q)
    if flash is None:
        _attend_each(q, out, layer, step)
    else:
        run_flash(
            flash,
            q[live],
            layer.k_cache,
            layer.v_cache,
            out[live],
            step.seq_lens,
            step.block_table,
            step.query_start_loc,
            layer.head_dim**-0.5,
            max_query_len=step.max_query_len,
        )
    if step.num_tokens < q.shape[0]:
        out[step.num_tokens :].zero_()


def _complaint(step: AttentionMetadata | None, rows: int) -> str:
    if step is None:
        return "mixed attention was called without requests; call the model inside `with for_requests(metadata):`."
    return f"the requests have {step.num_tokens} tokens, the forward only {rows} rows; pass at least as many rows."


def _attend_each(q: Tensor, out: Tensor, layer: Attention, step: AttentionMetadata) -> None:
    """Attend request by request, on any device; only eagerly, since it uses lengths on the host."""
    start = 0
    for pages, query, length in zip(step.block_table, step.query_lens, step.seq_lens_host, strict=True):
        rows = slice(start, start + query)
        keys, values = (_tokens(cache, pages, length) for cache in (layer.k_cache, layer.v_cache))
        # Aligned at the end: a request's last token sees its whole cache.
        causal = torch.ones(query, length, dtype=torch.bool, device=q.device).tril(length - query)
        result = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1), keys, values, attn_mask=causal, scale=layer.head_dim**-0.5, enable_gqa=True
        )
        out[rows].copy_(result.transpose(0, 1))
        start += query


def _tokens(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Return a request's part of a cache: (num_kv_heads, length, head_dim)."""
    blocks = -(-length // cache.shape[1])
    return cache.index_select(0, pages[:blocks]).flatten(0, 1)[:length].transpose(0, 1)


class MixedStep(NamedTuple):
    """A step whose requests are those of `for_requests`; cos, sin as in `LlamaStep`."""

    cos: Tensor
    sin: Tensor

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        mixed_attention(q, k, v, out, layer)


class MixedLlama(nn.Module):
    """A Llama for mixed batches, sharing another one's weights and caches; call it inside `for_requests`."""

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        self.llama = llama
        self.train(llama.training)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run one step.

        Args:
            input_ids, positions: (T,) int64, the requests' tokens and their positions, then padding.

        Returns:
            (T, vocab_size) logits, or (T, hidden_size) without lm_head; finite but meaningless for padding.
        """
        decoder = self.llama.model
        hidden = decoder.embed_tokens(input_ids)
        step = MixedStep(*decoder.rotary_emb(positions, hidden.dtype))
        return self.llama.head(decoder.run_layers(hidden, step))
