"""Decode context parallelism: every rank holds part of each sequence's keys and values, and attends to that part.

    ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cache = PagedKVCache(32, 1000, 16, 8, 128, dtype=torch.bfloat16, device="cuda")  # 1000 pages on each rank
    metadata = BatchMetadata(..., page_size=16, device="cuda", share=ContextShare(*ranks))
    backend = ContextParallelBackend(FlashAttentionBackend(cache, metadata, num_heads=32))

The engine describes the same step on all ranks, in whole sequences and one block table. Give the manager the ranks too
(`ranks=RankGroup()`): its graphs hold collectives.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.distributed.group import require_group


class ContextParallelBackend(AttentionBackend):
    """Runs another backend on this rank's part of every sequence, and merges the parts by log-sum-exp inside the graph.

    For decode steps of one token per request. All ranks run the same steps and are given the same keys and values, of
    which each keeps its share.

    Args:
        backend: the backend of this rank's cache. Its metadata has the rank's `ContextShare`; its num_heads counts the
            heads of all ranks.
        group: a `torch.distributed` process group of the ranks; None for all ranks. Pass it to the manager's
            `RankGroup` too (`communicators=[group]`).
        shard_heads: True if each rank's queries are a shard of the heads, as with tensor parallel ranks: they are
            gathered in the order of ranks, and each rank gets back its own. False if every rank has all heads.

    Raises:
        ConfigError: the group's ranks are not those of the metadata or do not divide the heads, or the backend cannot
            be in graphs.

    Source: ring attention's merge (arXiv 2310.01889); vLLM's decode context parallelism.
    """

    support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    name = "context parallel"

    def __init__(self, backend: AttentionBackend, group: Any = None, *, shard_heads: bool = False) -> None:
        super().__init__(backend.cache, backend.metadata, num_heads=backend.num_heads, scale=backend.scale)
        if backend.sinks is not None:
            raise ConfigError("the backend has sinks, which every rank would count; expected one without.")
        self._group = require_group(group)
        self._backend = backend
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        share = backend.metadata.share
        if tuple(share) != (self._rank, self._size):
            raise ConfigError(
                f"the metadata has {share}, this process is rank {self._rank} of {self._size} in the group; build "
                f"BatchMetadata with share=ContextShare({self._rank}, {self._size})."
            )
        if backend.support < self.support:
            raise ConfigError(f"{backend.name} cannot be in a full graph, even for decoding one token a request.")
        self._gathers = shard_heads and self._size > 1
        if self._gathers:
            if backend.num_heads % self._size:
                raise ConfigError(f"{self._size} ranks do not divide num_heads={backend.num_heads}.")
            self.num_heads = backend.num_heads // self._size

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        self._backend.prepare(mode, descriptor, metadata)

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._backend.end_of_forward(mode, descriptor)

    def run(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        if self._size == 1:
            self._backend.run(layer, q, out, metadata)
        elif not self._gathers:
            self._run_all_heads(layer, q, out, metadata)
        else:
            queries = self._gather(q).transpose(0, 1).flatten(1, 2)
            results = torch.zeros_like(queries)
            self._run_all_heads(layer, queries, results, metadata)
            out.copy_(results.chunk(self._size, dim=1)[self._rank])

    def _run_all_heads(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        lse = self._backend.run_with_lse(layer, q, out, metadata)
        # Kernels leave anything, even NaN, in rows of padding and of requests without tokens in this rank's cache.
        has_tokens = _has_tokens(metadata)[:, None]
        weight = self._gather(torch.where(has_tokens, lse, -torch.inf)).softmax(dim=0)[self._rank]
        parts = torch.where(has_tokens[..., None], out * weight[..., None], 0)  # in float32
        dist.all_reduce(parts, group=self._group)
        out.copy_(parts)

    def _gather(self, part: Tensor) -> Tensor:
        """Gather every rank's tensor: (ranks, *shape)."""
        everyone = part.new_empty(self._size * part.shape[0], *part.shape[1:])
        _all_gather(everyone, part.contiguous(), group=self._group)
        return everyone.view(self._size, *part.shape)


# Renamed in torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def _has_tokens(metadata: CommonMetadata) -> Tensor:
    """Return (T,) bool, True for the rows of requests that have tokens in this rank's cache."""
    has_tokens = metadata.seq_lens > 0
    padding = metadata.num_tokens - metadata.num_reqs  # padding behind the last request, if there are fewer of these
    return torch.nn.functional.pad(has_tokens, (0, padding)) if padding else has_tokens
