"""A small engine that replays attention backends at many lengths, and compares with float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend, attend
from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.layers import BackendGroup, attending
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import VerificationError
from simplegraph.batch.dispatch import Dispatch
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.manager import CudaGraphManager
from tests.support.reference_attention import reference_attention

LAYERS = 2
# Largest relative error of a single row, before it counts as wrong.
_WRONG_ROW = 2e-2


class Requests(NamedTuple):
    """The requests of a step: each one's tokens in this step, its tokens in the cache, and its pages."""

    query_lens: list[int]
    seq_lens: list[int]
    block_table: list[list[int]]

    def __str__(self) -> str:
        return f"query_lens={self.query_lens}, seq_lens={self.seq_lens}"


class AttentionEngine:
    """A small engine: two layers of attention on random queries, keys and values, through a manager.

    Args:
        make: a backend's class, called with cache, metadata and num_heads.
        device: where to run.
        num_heads, num_kv_heads, head_dim, page_size, dtype, layout: shape and dtype of the cache and the queries.
        num_pages, max_len, max_tokens, max_reqs: limits of the cache and of a step.
        window: keys that a token sees; None for all before it.
        **settings: passed to the manager.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        device: torch.device,
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        page_size: int = 4,
        num_pages: int = 64,
        max_len: int = 48,
        max_tokens: int = 32,
        max_reqs: int = 8,
        dtype: torch.dtype = torch.float32,
        layout: Any = "NHD",
        window: int | None = None,
        **settings: Any,
    ) -> None:
        rows: dict[str, Any] = {"dtype": dtype, "device": device}
        self.cache = PagedKVCache(LAYERS, num_pages, page_size, num_kv_heads, head_dim, layout=layout, **rows)
        limits: dict[str, Any] = {"max_num_tokens": max_tokens, "max_num_reqs": max_reqs, "max_model_len": max_len}
        limits |= {"page_size": page_size, "num_pages": num_pages, "window": window}
        self.metadata = BatchMetadata(**limits, device=device)
        self.backend: AttentionBackend | BackendGroup = make(self.cache, self.metadata, num_heads=num_heads)
        self.q = torch.zeros(max_tokens, num_heads, head_dim, **rows)
        self.k, self.v = (torch.zeros(max_tokens, num_kv_heads, head_dim, **rows) for _ in range(2))
        settings = {"max_num_seqs": max_reqs, "max_num_tokens": max_tokens, "progress": False} | settings
        self.manager = CudaGraphManager(
            device=device, support=self.backend.support, on_capture_failure="raise", **settings
        )
        self.manager.add_hooks(self.backend)

    def requests(self, kind: str, count: int, seed: int, query_len: int = 1) -> Requests:
        """Draw up to `count` requests of random lengths, as many as pages and tokens allow; "decode" is uniform."""
        draw, page_size = random.Random(seed), self.cache.page_size
        pages = list(range(1, self.cache.num_pages))  # page 0 is what padding and dummy runs read
        draw.shuffle(pages)
        found: list[tuple[int, int, list[int]]] = []
        tokens, most = 0, self.metadata.max_model_len
        for _ in range(count):
            query = query_len if kind == "decode" or draw.random() < 0.5 else draw.randint(1, min(64, most))
            length = max(query, int(most ** draw.random()) if draw.random() < 0.8 else draw.randint(1, most))
            needed = -(-length // page_size)
            if needed <= len(pages) and tokens + query <= self.metadata.max_num_tokens:
                tokens += query
                found.append((query, length, [pages.pop() for _ in range(needed)]))
        found = found or [(query_len, query_len, [pages.pop() for _ in range(-(-query_len // page_size))])]
        return Requests([q for q, _, _ in found], [length for _, length, _ in found], [table for *_, table in found])

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        """Return the attention of every layer: (T, num_heads, head_dim) each."""
        rows = descriptor.num_tokens
        with attending(self.backend, mode, descriptor):
            return [attend(self.q[:rows] * (layer + 1), self.k[:rows], self.v[:rows], layer) for layer in range(LAYERS)]

    def fill(self, seed: int) -> None:
        """Fill queries, keys, values and the cache with random numbers, the same for the same seed."""
        generator = torch.Generator(self.q.device).manual_seed(seed)
        for tensor in (self.q, self.k, self.v, self.cache._memory):
            tensor.normal_(generator=generator)

    def step(self, requests: Requests, seed: int) -> tuple[CudaGraphMode, float]:
        """Run and check one step; return its mode and its relative error against float64.

        Raises:
            VerificationError: a row is wrong, padding is not finite, or the cache differs from eager's.
        """
        self.fill(seed)
        tokens, count = sum(requests.query_lens), len(requests.query_lens)
        uniform = requests.query_lens[0] if len(set(requests.query_lens)) == 1 else None
        batch = self.manager.dispatch(tokens, count, uniform)
        expected = self._cache_after(requests)
        self.describe(requests, batch)
        outputs = self.manager.run(batch, self.forward)
        if not torch.equal(self._pages(), expected):
            raise VerificationError("after the step the cache differs from what eager leaves in it.")
        if not all(bool(output.isfinite().all()) for output in outputs):
            raise VerificationError("an output row is not finite, possibly a padding row.")
        return batch.mode, max(self._error(requests, outputs[layer], layer) for layer in range(LAYERS))

    def describe(self, requests: Requests, batch: Dispatch) -> None:
        """Write a step to the device."""
        full = batch.mode is CudaGraphMode.FULL
        num_reqs = batch.descriptor.num_reqs if full else len(requests.query_lens)
        self.metadata.set(*requests, num_tokens=batch.descriptor.num_tokens, num_reqs=num_reqs)

    def _pages(self) -> Tensor:
        return self.cache._memory[:, :, : self.cache.num_pages]

    def _error(self, requests: Requests, output: Tensor, layer: int) -> float:
        tokens = sum(requests.query_lens)
        q, backend = self.q[:tokens] * (layer + 1), self.backend.of_layer(layer)
        sinks = None if backend.sinks is None else backend.sinks[layer]
        masks: dict[str, Any] = {"window": backend.window, "softcap": backend.softcap, "sinks": sinks}
        exact = reference_attention(q, self.cache, layer, *requests, backend.scale, **masks)
        difference = output[:tokens].double() - exact
        worst = float((difference.norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-12)).max())
        if worst > _WRONG_ROW:
            raise VerificationError(f"a row of layer {layer} is off by {worst:.1e} of its size, beyond any rounding.")
        return float(difference.norm() / exact.norm())

    def _cache_after(self, requests: Requests) -> Tensor:
        """Return the cache as it must be after the step: this step's tokens added, everything else unchanged."""
        memory = self._pages().clone()
        rows = memory if self.cache.layout == "NHD" else memory.transpose(3, 4)
        token = 0
        for query, length, blocks in zip(*requests, strict=True):
            for position in range(length - query, length):
                page, offset = blocks[position // self.cache.page_size], position % self.cache.page_size
                rows[0, :, page, offset] = self.k[token]
                rows[1, :, page, offset] = self.v[token]
                token += 1
        return memory
