"""Mixed batches, in which some requests decode and others prefill; graphs need eager breaks to serve them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.models.workload import PAGE_SIZE, Workload
from bench.piecewise.mixed_llama import AttentionMetadata
from bench.tools import text

# Tokens in the cache before chunks two and three of a prompt: within a page, and at the end of one.
CACHED = (0, 50, 160)


class Chunk(NamedTuple):
    """One request's part of a step: `query` tokens, after `cached` ones. A decode has one token."""

    query: int
    cached: int = 0

    @property
    def length(self) -> int:
        """Tokens in the cache after the step."""
        return self.query + self.cached


class Mix(NamedTuple):
    """The requests of one batch, and its name."""

    name: str
    chunks: tuple[Chunk, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.query for chunk in self.chunks)


class MixedBatch(NamedTuple):
    """input_ids, positions: (num_tokens,) int64, the requests' tokens one after the other."""

    input_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata


def mixes(num_tokens: int, workload: Workload) -> list[Mix]:
    """Make batches of about `num_tokens` tokens: one prefill, decodes and a prefill, prompt chunks, a padded one."""
    # Half of the requests' pages at most, since prompts need pages as well.
    most = max(1, workload.max_batch // 2)
    few, many = (decodes(min(count, most), workload.context) for count in (num_tokens // 8, num_tokens // 2))
    fewer = num_tokens - max(1, num_tokens // 5)
    return [
        Mix("one prefill", (Chunk(num_tokens),)),
        Mix("decodes and a prefill", (*many, Chunk(num_tokens - len(many)))),
        Mix("chunks among decodes", (*few, *prompt_chunks(num_tokens - len(few)))),
        Mix("the same, padded", (*few, *prompt_chunks(fewer - len(few)))),
    ]


def decodes(count: int, context: int) -> tuple[Chunk, ...]:
    """Make `count` decodes, with contexts from short to `context` tokens."""
    return tuple(Chunk(1, (request * 31 + 7) % context) for request in range(count))


def prompt_chunks(num_tokens: int) -> tuple[Chunk, ...]:
    """Split `num_tokens` into three unequal chunks, with different parts of their prompts already cached."""
    first, second = num_tokens // 2, num_tokens // 3
    queries = (first, second, num_tokens - first - second)
    return tuple(Chunk(query, cached) for query, cached in zip(queries, CACHED, strict=True) if query)


def mixed_batch(workload: Workload, chunks: Sequence[Chunk], vocab_size: int, *, start: int = 0) -> MixedBatch:
    """Make one step of these requests, each on its own pages.

    Args:
        workload: the workload of the model whose cache is used.
        chunks: the requests, in order.
        start: the first byte of the text that is used, so that different calls use different tokens.

    Raises:
        ValueError: the cache has fewer pages than the requests need.
    """
    queries, cached = (torch.tensor(column) for column in zip(*chunks, strict=True))
    table = _block_table(queries + cached, workload.pages)
    starts = F.pad(queries.cumsum(0), (1, 0))
    request = torch.repeat_interleave(queries)
    positions = torch.arange(len(request)) - starts[request] + cached[request]
    slots = table[request, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    device = workload.device
    metadata = AttentionMetadata(
        slots=slots.to(device),
        query_start_loc=starts.int().to(device),
        seq_lens=(queries + cached).int().to(device),
        block_table=table.int().to(device),
        query_lens=tuple(chunk.query for chunk in chunks),
        seq_lens_host=tuple(chunk.length for chunk in chunks),
    )
    ids = text.token_ids(len(request), vocab_size, start=start)
    return MixedBatch(ids.to(device), positions.to(device), metadata)


def _block_table(lengths: Tensor, pages: int) -> Tensor:
    """Assign consecutive pages from 1 on: (num_reqs, max_blocks) int64, page 0 after a request's last one."""
    blocks = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    ends = blocks.cumsum(0)
    if int(ends[-1]) >= pages:
        raise ValueError(f"these requests need {int(ends[-1])} pages, the cache has {pages - 1}; build a larger one.")
    columns = torch.arange(int(blocks.max()))
    table = 1 + (ends - blocks)[:, None] + columns
    return table.where(columns < blocks[:, None], 0)
