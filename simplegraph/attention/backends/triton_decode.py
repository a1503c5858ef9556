"""Decode attention by a Triton kernel, everything else by another backend.

The libraries' kernels are built for long prompts, so the gain is largest at short contexts: docs/figures.md compares
an engine's steps with each of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend, Scores
from simplegraph.attention.backends.flash_attention import FlashAttentionBackend
from simplegraph.attention.backends.flashinfer import FlashInferBackend
from simplegraph.attention.backends.sdpa import SDPABackend
from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError, InputError
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.fused.choice import triton_runs
from simplegraph.manager.manager import Unpack

_MAX_ROWS = 64  # query tokens times the query heads that share a key head
_MAX_SPLITS = 32
_PROGRAMS_PER_MULTIPROCESSOR = 4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonDecodeBackend(AttentionBackend):
    """Uniform decode of one or a few tokens per request, in full graphs and eagerly; `mixed` takes other batches.

    The kernel reads all lengths on the device: nothing is planned, and a graph can hold several steps. It needs no
    package but Triton, which torch's builds for GPUs include.

    Args:
        cache, metadata, num_heads, scale, softcap, sinks: as for every backend; float16, bfloat16 or float32, either
            layout.
        mixed: called with the same arguments to make the backend of all other batches; by default the first of
            FlashAttention, FlashInfer and SDPA that works here.

    Attributes:
        mixed: the backend of all other batches, and of decode with more than 64 queries per key head (tokens of a
            request times the query heads that share the key head).

    Raises:
        ConfigError: the cache is not on a GPU or has another dtype, Triton is not installed or finds no C compiler,
            `mixed` cannot be made, or a full graph needs `mixed`, which does not support it.
        InputError: the elements of a head are not contiguous in `out`.

    Source: split-KV decoding, Flash-Decoding (Dao, Haziza, Massa, Sizov 2023).
    """

    support = AttentionCGSupport.UNIFORM_BATCH
    name = "Triton decode"
    features = ("window", "softcap", "sinks")

    def __init__(
        self,
        cache: PagedKVCache,
        metadata: BatchMetadata,
        *,
        num_heads: int,
        mixed: Callable[..., AttentionBackend] | None = None,
        **scores: Unpack[Scores],
    ) -> None:
        super().__init__(cache, metadata, num_heads=num_heads, **scores)
        if cache.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(f"the cache is on {cache.device}; Triton's kernels run on a GPU.")
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("the decode kernel is written in Triton; to have it: pip install triton.")
        if cache.device.type == "cuda" and not triton_runs(cache.device):
            raise ConfigError(
                f"Triton cannot launch kernels on {cache.device}, and the log says why: most often there is no C "
                "compiler (CC, gcc or clang), or no Python.h. Install one, or take another backend."
            )
        if cache.dtype not in _DTYPES:
            raise ConfigError(f"the cache is of {cache.dtype}; the decode kernel takes {', '.join(map(str, _DTYPES))}.")
        from simplegraph.attention.kernels import decode as decode_kernel

        self._kernel = decode_kernel
        make = _first_that_works if mixed is None else mixed
        self.mixed = make(cache, metadata, num_heads=num_heads, **scores)
        self._group = num_heads // cache.num_kv_heads
        # Consecutive steps in one graph have one token per request, hence `_group` rows.
        self.reads_lengths_on_device = self._group <= _MAX_ROWS or self.mixed.reads_lengths_on_device
        # Enough programs to fill the device; a shape with that many needs no splits.
        self._programs = _PROGRAMS_PER_MULTIPROCESSOR * _multiprocessors(cache.device)
        places = max(self._programs, metadata.max_num_reqs * cache.num_kv_heads)
        self._arrived = torch.zeros(places, dtype=torch.int32, device=cache.device)
        size = self._programs * decode_kernel.part_size(_MAX_ROWS, cache.head_dim)
        self._parts = torch.empty(size, dtype=torch.float32, device=cache.device)
        self._query_len: int | None = None
        self._compiled: set[tuple[int, bool]] = set()

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        self._query_len = self._uniform(mode, descriptor, metadata)
        if self._query_len is None:
            self._check_mixed(mode, descriptor)
            self.mixed.prepare(mode, descriptor, metadata)
        elif metadata.batch.capturing:
            self._compile(self._query_len, metadata)

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self.mixed.end_of_forward(mode, descriptor)

    def _check_mixed(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        query_len = descriptor.uniform_query_len
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        needed = single if query_len == 1 else AttentionCGSupport.UNIFORM_BATCH
        if mode is CudaGraphMode.FULL and self.mixed.support < needed:
            raise ConfigError(
                f"a full graph of query_len={query_len} and {self._group} query heads per key head exceeds the decode "
                f"kernel's {_MAX_ROWS} rows, and {self.mixed.name} cannot be in it; pass another backend as `mixed`."
            )

    def _compile(self, query_len: int, metadata: CommonMetadata) -> None:
        """Launch the kernel once: the first launch loads it, which is not allowed inside a capture."""
        variant = query_len, self._num_splits(metadata.num_reqs) > 1
        if variant not in self._compiled:
            shape = (metadata.num_reqs * query_len, self.num_heads, self.cache.head_dim)
            q = torch.zeros(shape, dtype=self.cache.dtype, device=self.cache.device)
            # Context parallel ranks run the variant with the log-sum-exp.
            run = self.run_with_lse if self.metadata.share.size > 1 else self.run
            run(self.cache.layers[0], q, torch.empty_like(q), metadata)
            self._compiled.add(variant)

    def run(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        if self._query_len is None:
            self.mixed.run(layer, q, out, metadata)
        else:
            self._decode(self._query_len, layer, q, out, metadata, None)

    def run_with_lse(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> Tensor:
        if self._query_len is None:
            return self.mixed.run_with_lse(layer, q, out, metadata)
        lse = torch.zeros(q.shape[:2], dtype=torch.float32, device=q.device)
        self._decode(self._query_len, layer, q, out, metadata, lse)
        return lse

    def _decode(
        self, query_len: int, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata, lse: Tensor | None
    ) -> None:
        if out.stride(2) != 1:
            raise InputError(
                f"out has strides {out.stride()}; the decode kernel writes a head's elements one after the other. "
                "Pass a contiguous tensor."
            )
        self._kernel.decode(
            q if q.stride(2) == 1 else q.contiguous(),
            *(self.cache.keys(layer), self.cache.values(layer), metadata.block_table, metadata.seq_lens, out),
            query_len=query_len,
            scale=self.scale,
            layout=self.cache.layout,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[layer],
            lse=lse,
            num_splits=self._num_splits(metadata.num_reqs),
            parts=self._parts,
            arrived=self._arrived,
        )

    def _uniform(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> int | None:
        """Return the tokens of each request if they are equal and the kernel takes them; None to use `mixed`."""
        batch, query_len = metadata.batch, descriptor.uniform_query_len
        if mode is not CudaGraphMode.FULL:
            query_len = batch.max_query_len if batch.has_query_len(batch.max_query_len) else None
        return query_len if query_len is not None and query_len * self._group <= _MAX_ROWS else None

    def _num_splits(self, num_reqs: int) -> int:
        """Return the most splits for a shape; it depends on the shape alone, so that capture and replays agree."""
        return max(1, min(_MAX_SPLITS, self._programs // (num_reqs * self.cache.num_kv_heads)))


def _first_that_works(*arguments: Any, **options: Any) -> AttentionBackend:
    for make in (FlashAttentionBackend, FlashInferBackend):
        with contextlib.suppress(ConfigError):  # not installed, or not for this cache
            return make(*arguments, **options)
    return SDPABackend(*arguments, **options)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
