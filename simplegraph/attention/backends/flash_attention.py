"""FlashAttention-3 over a paged cache, as vLLM builds it (`vllm-flash-attn`).

It schedules its work on the device, from the lengths there. The schedule is captured together with the
kernels, so every replay computes its own: a step needs no work on the host.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend, Scores, check_arguments, missing_argument
from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.metadata.reading import check_counts
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import explain_command
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.manager import Unpack

MODULES = ("vllm_flash_attn", "vllm.vllm_flash_attn", "flash_attn_interface")
HOW_TO_INSTALL = (
    "take the kernels out of the vLLM wheel that is built for this torch, as "
    f"`{explain_command('flash-attention')}` says"
)
MAX_SPLITS = 32
# Functions that are called, and the arguments that they are passed.
_NEEDED = {
    "flash_attn_varlen_func": (
        *("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "seqused_k", "block_table", "softmax_scale", "causal", "out"),
        *("fa_version", "return_softmax_lse", "scheduler_metadata", "num_splits"),
    ),
    "get_scheduler_metadata": (
        *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"),
        *("qkv_dtype", "cu_seqlens_q", "page_size", "causal", "num_splits"),
    ),
}


class FlashAttentionBackend(AttentionBackend):
    """FlashAttention-3 (Hopper): any batch in a full graph, mixed ones included.

    Args:
        cache, metadata, num_heads, scale, softcap, sinks: as for every backend; the cache is NHD, float16 or bfloat16,
            and sinks are bfloat16.
        max_splits: the most parts that a sequence's keys are split into. Scheduling and kernel use the same bound:
            with different ones the kernel reads out of bounds (vLLM #20301). The kernel allocates that many float32
            outputs per token, so sizes that fill the device without splitting get a lower bound.

    Raises:
        ConfigError: the device is no Hopper GPU, no FlashAttention-3 is installed or not one with the arguments that
            are needed, or the cache's layout or a dtype is not supported.

    Source: ahead-of-time scheduling, FlashAttention-3 (arXiv 2407.08608).
    """

    support = AttentionCGSupport.ALWAYS
    name = "FlashAttention-3"
    features = ("window", "softcap", "sinks")
    reads_lengths_on_device = True

    def __init__(
        self,
        cache: PagedKVCache,
        metadata: BatchMetadata,
        *,
        num_heads: int,
        max_splits: int = MAX_SPLITS,
        **scores: Unpack[Scores],
    ) -> None:
        super().__init__(cache, metadata, num_heads=num_heads, **scores)
        self._flash = flash_module(cache.device)
        # A window of W keys, the token's own included, is W - 1 on its left; one on the schedule alone, or on the
        # kernel alone, is a schedule for other work.
        window = {} if self.window is None else {"window_size": (self.window - 1, 0)}
        self._masks: dict[str, Any] = window | ({} if self.softcap is None else {"softcap": self.softcap})
        check_arguments(self._flash, {"flash_attn_varlen_func": self._masks})
        if cache.layout != "NHD":
            raise ConfigError(f"the cache has layout {cache.layout}; FlashAttention reads pages laid out as NHD.")
        if cache.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(f"the cache is {cache.dtype}; FlashAttention computes in float16 or bfloat16.")
        self._max_query_len = 0
        if self.sinks is not None:
            check_arguments(self._flash, {"flash_attn_varlen_func": ("s_aux",)})
            if any(sinks.dtype is not torch.bfloat16 for sinks in self.sinks.values()):
                raise ConfigError("sinks are not torch.bfloat16, the only dtype that FlashAttention-3 reads.")
        self._scheduled = window | ({} if self.softcap is None else {"has_softcap": True})
        check_arguments(self._flash, {"get_scheduler_metadata": self._scheduled})
        check_counts(max_splits=max_splits)
        self.max_splits = max_splits
        self._multiprocessors = torch.cuda.get_device_properties(cache.device).multi_processor_count
        self._schedule: Tensor | None = None
        self._last_layer = -1

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        # A full graph holds it as a constant, in kernel and schedule, so it is the most that any replay may bring.
        most = descriptor.uniform_query_len or metadata.num_tokens
        self._max_query_len = most if mode is CudaGraphMode.FULL else metadata.batch.max_query_len
        self._schedule = None
        self._last_layer = -1

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._schedule = None  # it lies in the graph's memory; the next forward computes its own

    def num_splits(self, metadata: CommonMetadata) -> int:
        """Return the most splits for a padded shape: enough for up to four pieces of work per multiprocessor.

        It depends on the shape alone, so that capture and every replay agree. It is rounded down, since a bound of 1
        saves the kernel that combines the splits.
        """
        tiles = metadata.num_tokens * self.cache.num_kv_heads
        return max(1, min(self.max_splits, 4 * self._multiprocessors // tiles))

    def run(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        self._call(layer, q, out, metadata)

    def run_with_lse(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> Tensor:
        lse: Tensor = self._call(layer, q, out, metadata, return_softmax_lse=True)[1]
        return lse.transpose(0, 1)  # the kernels return (num_heads, T)

    def _call(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata, **options: Any) -> Any:
        # A layer index that does not rise means that another forward has begun.
        if self._schedule is None or layer <= self._last_layer:
            self._schedule = self._compute_schedule(metadata)
        self._last_layer = layer
        if self.sinks is not None:
            options["s_aux"] = self.sinks[layer]
        return self._flash.flash_attn_varlen_func(
            q,
            self.cache.keys(layer),
            self.cache.values(layer),
            max_seqlen_q=self._max_query_len,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_k=self.metadata.max_seq_len,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            softmax_scale=self.scale,
            causal=True,
            out=out,
            fa_version=3,
            scheduler_metadata=self._schedule,
            num_splits=self.num_splits(metadata),
            **self._masks,
            **options,
        )

    def _compute_schedule(self, metadata: CommonMetadata) -> Tensor:
        schedule: Tensor = self._flash.get_scheduler_metadata(
            batch_size=metadata.num_reqs,
            max_seqlen_q=self._max_query_len,
            max_seqlen_k=self.metadata.max_seq_len,
            num_heads_q=self.num_heads,
            num_heads_kv=self.cache.num_kv_heads,
            headdim=self.cache.head_dim,
            cache_seqlens=metadata.seq_lens,
            qkv_dtype=self.cache.dtype,
            cu_seqlens_q=metadata.query_start_loc,
            page_size=self.cache.page_size,
            causal=True,
            num_splits=self.num_splits(metadata),
            **self._scheduled,
        )
        return schedule


@functools.cache
def flash_module(device: torch.device) -> ModuleType:
    """Import the installed FlashAttention-3, the first of `MODULES` that has it, for the GPU that will run it.

    Raises:
        ConfigError: none is installed, or the device cannot run it; the message says what was tried and how to get it.
    """
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    if capability[0] != 9:
        found = ".".join(map(str, capability))
        raise ConfigError(f"FlashAttention-3 needs a Hopper GPU (compute capability 9); {device} has {found}.")
    tried = []
    for name in MODULES:
        problem = problem_of(name)
        if problem is None:
            return importlib.import_module(name)
        tried.append(f"{name} ({problem})")
    raise ConfigError(
        f"no FlashAttention-3 is installed; tried {', '.join(tried)}. The registry's vllm-flash-attn is built "
        f"for torch 2.4; {HOW_TO_INSTALL}."
    )


def problem_of(name: str) -> str | None:
    """Return the reason why a module cannot serve; None if it can."""
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # absent, or built for another torch
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    if not getattr(module, "FA3_AVAILABLE", False):
        return "has no version 3"
    return missing_argument(module, _NEEDED)
