"""The engine's configuration, and the cache and attention that follow from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from bench.engine.request import EngineError
from bench.models.llama import Attention
from bench.models.mamba import Mamba2
from simplegraph import ConfigError, CudaGraphMode
from simplegraph.attention import (
    AttentionBackend,
    BatchMetadata,
    FlashAttentionBackend,
    FlashInferBackend,
    Mamba2Backend,
    PagedKVCache,
    SDPABackend,
    StateCache,
    StateMetadata,
    TritonDecodeBackend,
)

BACKENDS: dict[str, Callable[..., AttentionBackend]] = {
    "triton": TritonDecodeBackend,
    "fa3": functools.partial(FlashAttentionBackend, version=3),
    "fa2": functools.partial(FlashAttentionBackend, version=2),
    "flashinfer": FlashInferBackend,
    "sdpa": SDPABackend,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The limits of an engine, and how it runs.

    Args:
        mode: of the graphs, by name; "NONE" runs everything eagerly.
        attention: a name in `BACKENDS`; "auto" takes the first that works on this machine.
        max_num_seqs: requests that run at once.
        num_state_slots: requests whose states recurrent layers keep; by default `max_num_seqs`. With fewer, no more
            requests run at once, and the others wait.
        max_num_tokens: tokens of a step: all its requests' prompts and decodes together.
        max_model_len: tokens of a request, prompt and output.
        num_pages: of the KV cache, one of them for padding; page_size: tokens in a page. Layers with a sliding window
            have a cache of their own, with as many pages at most.
        capture_sizes: in tokens; the library's default ones up to `max_num_seqs` for decoding, and up to 512 for mixed
            steps.
        tokens_per_launch: decode steps of one graph, which are taken together while every running request is greedy and
            has as many tokens left, and none waits. Needs full graphs, attention that reads lengths on the device, and
            layers without a window.
        overlap: plan and launch a step before the previous one has ended.
        two_batch_overlap: "on" splits the steps of full graphs in two micro-batches, one of which computes while ranks
            sum the other; sizes those of graphs of so many tokens; "off" none. Not for compiled layers, nor with
            several tokens in a launch.
        fused: True to run layers on fused operators; by default in half precision, if Triton's kernels run.
        compiled: True to run plain layers through torch.compile, split at attention, instead: the baseline.
        progress: show a progress bar while capturing.

    Raises:
        EngineError: a number is too small.
    """

    mode: str = "FULL_AND_PIECEWISE"
    attention: str = "auto"
    max_num_seqs: int = 64
    num_state_slots: int | None = None
    max_num_tokens: int = 2048
    max_model_len: int = 4096
    num_pages: int = 4096
    page_size: int = 16
    capture_sizes: tuple[int, ...] | None = None
    tokens_per_launch: int = 1
    overlap: bool = True
    two_batch_overlap: Literal["off", "on"] | tuple[int, ...] = "off"
    fused: bool | None = None
    compiled: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_tokens", "max_model_len", "page_size", "tokens_per_launch"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        slots = self.num_state_slots
        require(slots is None or slots >= 1, "num_state_slots", slots, "at least 1, or None for max_num_seqs")
        require(self.num_pages >= 2, "num_pages", self.num_pages, "at least 2: one is for padding")
        known = ("auto", *BACKENDS)
        require(self.attention in known, "attention", self.attention, f"one of {', '.join(known)}")
        # A step has at least one token of every running request, so that all of them go on.
        require(
            self.max_num_tokens >= self.max_num_seqs, "max_num_tokens", self.max_num_tokens, "at least max_num_seqs"
        )
        able = CudaGraphMode.parse(self.mode).has_full() and not self.compiled and self.tokens_per_launch == 1
        overlap, expected = self.two_batch_overlap, "'off', or with full graphs 'on' or a tuple of sizes"
        allowed = overlap in ("off", "on") or isinstance(overlap, tuple)
        require(allowed and (able or overlap == "off"), "two_batch_overlap", overlap, expected)
        require(not (self.compiled and self.fused), "fused", self.fused, "None or False where compiled is True")

    def micro_batch(self, whole: Sequence[AttentionBackend]) -> list[AttentionBackend]:
        """Make backends for a half of a step, over the caches of the whole step's."""
        found = []
        for backend in whole:
            limits = backend.metadata.max_num_tokens, backend.metadata.max_model_len
            metadata = self.metadata(*limits, backend.metadata.device, backend.window)
            found.append(type(backend)(backend.cache, metadata, num_heads=backend.num_heads))
        return found

    def micro_states(self, whole: Mamba2Backend) -> Mamba2Backend:
        """Make a backend of recurrent layers for a half of a step, over the states of the whole step's."""
        metadata = self.state_metadata(whole.cache.device)
        return Mamba2Backend(whole.cache, metadata, shape=whole.shape, weights=whole.weights)

    def cache(self, layers: Sequence[int], shape: Attention, weight: Tensor, window: int | None = None) -> PagedKVCache:
        """Make the KV cache of some layers, on the weight's device and in its dtype.

        With a window it has no more pages than all requests together can use.
        """
        pages = self.num_pages
        if window is not None:
            each = -(-(window - 1) // self.page_size) + 2
            pages = min(pages, 1 + self.max_num_seqs * each + -(-self.max_num_tokens // self.page_size))
        return PagedKVCache(
            len(layers),
            pages,
            self.page_size,
            shape.num_kv_heads,
            shape.head_dim,
            dtype=weight.dtype,
            device=weight.device,
            layers=layers,
        )

    def states(self, layers: Sequence[Mamba2], weight: Tensor) -> Mamba2Backend:
        """Make the states of recurrent layers, metadata and a backend for them; a request's state slot is its own."""
        shape = layers[0].shape
        metadata = self.state_metadata(weight.device)
        cache = StateCache(
            self.max_num_seqs,
            shape.states(weight.dtype),
            layers=[layer.index for layer in layers],
            device=weight.device,
        )
        return Mamba2Backend(cache, metadata, shape=shape, weights={layer.index: layer.weights for layer in layers})

    def state_metadata(self, device: torch.device) -> StateMetadata:
        """Make the metadata of a step's requests, for recurrent layers."""
        return StateMetadata(
            max_num_tokens=self.max_num_tokens,
            max_num_reqs=self.max_num_seqs,
            max_model_len=self.max_model_len,
            device=device,
        )

    def with_slots(self, recurrent: bool) -> EngineConfig:
        """Return the config for a model: where layers are recurrent, no more requests run at once than states fit."""
        slots = self.num_state_slots
        if not recurrent or slots is None or slots >= self.max_num_seqs:
            return self
        return dataclasses.replace(self, max_num_seqs=slots)

    def metadata(
        self, max_num_tokens: int, max_model_len: int, device: torch.device, window: int | None = None
    ) -> BatchMetadata:
        """Make the metadata of a step's requests, for attention."""
        return BatchMetadata(
            max_num_tokens=max_num_tokens,
            max_num_reqs=self.max_num_seqs,
            max_model_len=max_model_len,
            page_size=self.page_size,
            device=device,
            window=window,
        )

    def backends(self, layers: Sequence[Attention], weight: Tensor) -> list[AttentionBackend]:
        """Make a cache, metadata and a backend for the layers of each window; those that see all keys come first.

        Raises:
            EngineError: no backend works for one of them.
        """
        groups: dict[int | None, list[Attention]] = {}
        for layer in layers:
            whole = layer.window is None or layer.window >= self.max_model_len
            groups.setdefault(None if whole else layer.window, []).append(layer)
        found = []
        for window in sorted(groups, key=lambda window: window or 0):
            shape = groups[window][0]
            cache = self.cache([layer.index for layer in groups[window]], shape, weight, window)
            metadata = self.metadata(self.max_num_tokens, self.max_model_len, weight.device, window)
            found.append(self.backend(cache, metadata, shape.num_heads))
        return found

    def backend(self, cache: PagedKVCache, metadata: BatchMetadata, num_heads: int) -> AttentionBackend:
        """Make the backend that `attention` names; for "auto" the first that works on this machine.

        Raises:
            EngineError: no backend works.
        """
        problems = []
        for name in BACKENDS if self.attention == "auto" else (self.attention,):
            try:
                return BACKENDS[name](cache, metadata, num_heads=num_heads)
            except ConfigError as error:
                problems.append(f"{name}: {error}")
        raise EngineError(f"no attention backend works here: {'; '.join(problems)}")


def require(fine: bool, name: str, value: object, expected: str) -> None:
    """Refuse a setting that is not `fine`.

    Raises:
        EngineError: `fine` is False.
    """
    if not fine:
        raise EngineError(f"{name} is {value!r}; expected {expected}.")
