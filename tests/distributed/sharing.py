"""Ranks that share every sequence's keys and values, checked against attention over the whole of them in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import simplegraph as sg
from simplegraph.attention import (
    BatchMetadata,
    ContextParallelBackend,
    ContextShare,
    PagedKVCache,
    attend,
    attending,
)
from tests.support.reference_attention import reference_attention

LAYERS = 2


class SharingEngine:
    """Two layers of attention on random queries, keys and values; the same on all ranks, but for the share of each."""

    def __init__(
        self,
        make: Callable[..., Any],
        device: str,
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        page_size: int = 4,
        num_pages: int = 40,
        max_len: int = 96,
        max_reqs: int = 8,
        dtype: torch.dtype = torch.float32,
        mode: str = "FULL_DECODE_ONLY",
        shard_heads: bool = False,
        **settings: Any,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.cache = PagedKVCache(LAYERS, num_pages, page_size, num_kv_heads, head_dim, **options)
        self.whole = PagedKVCache(LAYERS, num_pages, page_size * self.size, num_kv_heads, head_dim, **options)
        self.metadata = BatchMetadata(
            max_num_tokens=max_reqs,
            max_num_reqs=max_reqs,
            max_model_len=max_len,
            page_size=page_size,
            device=device,
            share=ContextShare(self.rank, self.size),
        )
        inner = make(self.cache, self.metadata, num_heads=num_heads)
        self.backend = ContextParallelBackend(inner, shard_heads=shard_heads)
        self.manager = sg.CudaGraphManager(
            device=device,
            mode=mode,
            support=self.backend.support,
            max_num_seqs=max_reqs,
            max_num_tokens=max_reqs,
            progress=False,
            on_capture_failure="raise",
            ranks=sg.RankGroup(timeout=60),
            **settings,
        )
        self.manager.add_hooks(self.backend)
        self.heads = slice(None)
        if shard_heads:
            each = num_heads // self.size
            self.heads = slice(self.rank * each, (self.rank + 1) * each)
        self.q = torch.zeros(max_reqs, num_heads, head_dim, **options)
        self.own_q = torch.zeros(max_reqs, self.backend.num_heads, head_dim, **options)
        self.k, self.v = (torch.zeros(max_reqs, num_kv_heads, head_dim, **options) for _ in range(2))

    def forward(self, mode: sg.CudaGraphMode, descriptor: sg.BatchDescriptor) -> list[Tensor]:
        rows = descriptor.num_tokens
        with attending(self.backend, mode, descriptor):
            return [attend(self.own_q[:rows] * (i + 1), self.k[:rows], self.v[:rows], i) for i in range(LAYERS)]

    def share_of(self, whole: Tensor) -> Tensor:
        """Of a cache's memory, (2, layers, pages, page_size * size, ...), what this rank holds."""
        return whole[:, :, :, self.rank :: self.size]

    def step(self, lengths: list[int], seed: int, tables: list[list[int]] | None = None) -> tuple[Any, float]:
        """Decode one token of requests of these lengths: how it ran, and the relative error of this rank's heads.

        `tables` lets requests share pages, as the tokens of one prompt do.
        """
        generator = torch.Generator(self.q.device).manual_seed(seed)
        for tensor in (self.q, self.k, self.v, self.whole._memory):
            tensor.normal_(generator=generator)
        self.own_q.copy_(self.q[:, self.heads])
        self.cache._memory[:, :, :-1].copy_(self.share_of(self.whole._memory[:, :, :-1]))
        count, page = len(lengths), self.whole.page_size
        tables = tables or self.pages(lengths, seed)
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            place = table[(length - 1) // page], (length - 1) % page
            for layer in range(LAYERS):
                self.whole.keys(layer)[place], self.whole.values(layer)[place] = self.k[row], self.v[row]
        batch = self.manager.dispatch(count, count, 1)
        padded = batch.descriptor
        reqs = padded.num_reqs if batch.mode is sg.CudaGraphMode.FULL else count
        self.metadata.set([1] * count, lengths, tables, num_tokens=padded.num_tokens, num_reqs=reqs)
        found = self.manager.run(batch, self.forward)
        kept = self.share_of(self.whole._memory[:, :, :-1])
        assert torch.equal(self.cache._memory[:, :, :-1], kept), "the cache is not this rank's share of the whole"
        errors = []
        for layer, out in enumerate(found):
            assert bool(out.isfinite().all()), "a row is not finite, padding maybe"
            q = self.q[:count] * (layer + 1)
            exact = reference_attention(q, self.whole, layer, [1] * count, lengths, tables, self.backend.scale)
            exact = exact[:, self.heads]
            errors.append(float((out[:count].double() - exact).norm() / exact.norm()))
        return batch.mode, max(errors)

    def pages(self, lengths: list[int], seed: int) -> list[list[int]]:
        pool = list(range(1, self.cache.num_pages))
        random.Random(seed).shuffle(pool)
        return [[pool.pop() for _ in range(-(-length // self.whole.page_size))] for length in lengths]


def serve(rank: int, size: int, make: Callable[..., Any], device: str, steps: int, settings: dict[str, Any]) -> Any:
    """Lengths from one token, of which most ranks hold nothing, to the longest: modes seen, worst error, replays."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    seen, worst = set(), 0.0
    with torch.inference_mode():
        engine = SharingEngine(make, device, **settings)
        assert engine.manager.capture(engine.forward).failed == {}
        most, longest = engine.metadata.max_num_reqs, engine.metadata.max_model_len
        for seed in range(steps):
            draw = random.Random(seed)
            lengths = [draw.choice([1, 2, size, draw.randint(1, longest)]) for _ in range(draw.randint(1, most))]
            mode, error = engine.step(lengths, seed)
            seen.add(mode.name)
            worst = max(worst, error)
        mode, error = engine.step([1], steps)
        replays = engine.manager.stats.replays
        engine.manager.reset()
    return seen, max(worst, error), replays


def serve_both(
    rank: int, size: int, make: Callable[..., Any], device: str, steps: int, settings: dict[str, Any]
) -> Any:
    """`serve` with all heads on all ranks, and with some on each; in one process, since starting CUDA takes seconds."""
    return [serve(rank, size, make, device, steps, settings | {"shard_heads": shard}) for shard in (False, True)]
