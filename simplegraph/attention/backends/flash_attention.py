"""FlashAttention over a paged cache, versions 2 and 3, as vLLM or the project itself builds it.

Both read lengths on the device, and version 3 schedules its work there. What they compute from lengths is captured
together with the kernels, so every replay computes its own: a step needs no work on the host.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend, Scores, check_arguments, missing_argument
from simplegraph.attention.backends.flash_kernels import (
    GPUS,
    MODULES,
    VERSION_2,
    VERSION_2_PLAIN,
    VERSION_3,
    FlashKernels,
)
from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.attention.metadata.step_arrays import check_counts
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import explain_command
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.manager import Unpack

HOW_TO_INSTALL = (
    "take the kernels out of the vLLM wheel that is built for this torch, as "
    f"`{explain_command('flash-attention')}` says"
)
MAX_SPLITS = 32


class FlashAttentionBackend(AttentionBackend):
    """FlashAttention-3 (Hopper): any batch in a full graph. FlashAttention-2 (Ampere or newer): uniform batches.

    Args:
        cache, metadata, num_heads, scale, softcap, sinks: as for every backend; the cache is NHD, float16 or bfloat16.
            Sinks are bfloat16, and need version 3.
        version: 3 or 2; None for 3 where the device runs it and a build of it is installed, else 2.
        max_splits: for version 3, the most parts that a sequence's keys are split into. Scheduling and kernel use the
            same bound: with different ones the kernel reads out of bounds (vLLM #20301). The kernel allocates that many
            float32 outputs per token, so sizes that fill the device without splitting get a lower bound.

    Attributes:
        support: the steps that this instance's version can run in a full graph.
        version: of the kernels.

    Raises:
        ConfigError: the version is unknown, the device cannot run it, no build of it is installed or not one with the
            arguments that are needed; or the version does not support sinks, the cache's layout, pages or a dtype.

    Source: ahead-of-time scheduling, FlashAttention-3 (arXiv 2407.08608).
    """

    support = AttentionCGSupport.ALWAYS
    name = "FlashAttention"
    features = ("window", "softcap", "sinks")
    reads_lengths_on_device = True

    def __init__(
        self,
        cache: PagedKVCache,
        metadata: BatchMetadata,
        *,
        num_heads: int,
        version: int | None = None,
        max_splits: int = MAX_SPLITS,
        **scores: Unpack[Scores],
    ) -> None:
        super().__init__(cache, metadata, num_heads=num_heads, **scores)
        self._flash, self._kernels = find_kernels(cache.device, version)
        self.version = self._kernels.version
        self.name = f"{self.name}-{self.version}"
        self.support = min(self.support, self._kernels.support)
        # A window of W keys, the token's own included, is W - 1 on its left; one on the schedule alone, or on the
        # kernel alone, is a schedule for other work.
        window = {} if self.window is None else {"window_size": (self.window - 1, 0)}
        self._masks: dict[str, Any] = window | ({} if self.softcap is None else {"softcap": self.softcap})
        check_arguments(self._flash, {"flash_attn_varlen_func": self._masks})
        self._check_cache()
        if self.sinks is not None:
            self._check_sinks(self.sinks)
        self._scheduled = window | ({} if self.softcap is None else {"has_softcap": True})
        if self._kernels.has_schedule:
            check_arguments(self._flash, {"get_scheduler_metadata": self._scheduled})
        check_counts(max_splits=max_splits)
        self.max_splits = max_splits
        self._multiprocessors = torch.cuda.get_device_properties(cache.device).multi_processor_count
        self._max_query_len = self._rows = 0
        self._of_step: dict[str, Any] | None = None
        self._real_rows: Tensor | None = None
        self._last_layer = -1

    def _check_cache(self) -> None:
        cache, multiple = self.cache, self._kernels.page_multiple
        if cache.layout != "NHD":
            raise ConfigError(f"the cache has layout {cache.layout}; FlashAttention reads pages laid out as NHD.")
        if cache.dtype not in (torch.float16, torch.bfloat16):
            raise ConfigError(f"the cache is {cache.dtype}; FlashAttention computes in float16 or bfloat16.")
        if cache.page_size % multiple:
            raise ConfigError(
                f"pages have {cache.page_size} tokens; {self.name} of {self._flash.__name__} reads pages of a multiple "
                f"of {multiple}."
            )

    def _check_sinks(self, sinks: Mapping[int, Tensor]) -> None:
        if not self._kernels.has_sinks:
            raise ConfigError(f"{self.name} has no sinks; use version 3, or another backend for these layers.")
        check_arguments(self._flash, {"flash_attn_varlen_func": ("s_aux",)})
        if any(sink.dtype is not torch.bfloat16 for sink in sinks.values()):
            raise ConfigError("sinks are not torch.bfloat16, the only dtype that FlashAttention-3 reads.")

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        # A full graph holds it as a constant, in kernel and schedule, so it is the most that any replay may bring.
        most = descriptor.uniform_query_len or metadata.num_tokens
        is_full = mode is CudaGraphMode.FULL
        self._max_query_len = most if is_full else metadata.batch.max_query_len
        # Version 2 refuses rows of padding behind requests of one token each.
        self._rows = metadata.num_tokens if is_full else metadata.batch.num_tokens
        self._of_step = self._real_rows = None
        self._last_layer = -1

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._of_step = self._real_rows = None  # they lie in the graph's memory; the next forward computes its own

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
        kernel_lse: Tensor = self._call(layer, q, out, metadata, **{self._kernels.lse: True})[1]
        lse = kernel_lse.transpose(0, 1)  # the kernels return (num_heads, rows)
        return lse if len(lse) == len(q) else torch.nn.functional.pad(lse, (0, 0, 0, len(q) - len(lse)))

    def _call(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata, **options: Any) -> Any:
        if self._rows < len(q):
            q, out = q[: self._rows], out[: self._rows]
        # A layer index that does not rise means that another forward has begun.
        if self._of_step is None or layer <= self._last_layer:
            self._of_step = self._arguments_of_step(metadata)
        self._last_layer = layer
        if self.sinks is not None:
            options["s_aux"] = self.sinks[layer]
        if not self._kernels.is_plain:
            options["out"] = out
        result = self._flash.flash_attn_varlen_func(
            q,
            self.cache.keys(layer),
            self.cache.values(layer),
            max_seqlen_q=self._max_query_len,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_k=self.metadata.max_seq_len,
            block_table=metadata.block_table,
            softmax_scale=self.scale,
            causal=True,
            **self._kernels.constants,
            **self._of_step,
            **self._masks,
            **options,
        )
        if self._real_rows is not None:
            out.copy_(torch.where(self._real_rows, result[0] if isinstance(result, tuple) else result, out))
        return result

    def _arguments_of_step(self, metadata: CommonMetadata) -> dict[str, Any]:
        """Compute the tensors that all layers of a forward read beside queries and pages."""
        if self._kernels.is_plain:
            # The kernels' own tensor is undefined behind the last request, and padding rows must stay finite.
            row = torch.arange(self._rows, device=metadata.seq_lens.device)
            self._real_rows = (row < metadata.query_start_loc[-1])[:, None, None]
            ends = metadata.seq_lens.cumsum(0, dtype=torch.int32)
            return {"cu_seqlens_k": torch.nn.functional.pad(ends, (1, 0))}
        arguments = {"seqused_k": metadata.seq_lens}
        if not self._kernels.has_schedule:
            return arguments
        splits = self.num_splits(metadata)
        return {**arguments, "num_splits": splits, "scheduler_metadata": self._compute_schedule(metadata, splits)}

    def _compute_schedule(self, metadata: CommonMetadata, num_splits: int) -> Tensor:
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
            num_splits=num_splits,
            **self._scheduled,
        )
        return schedule


def find_kernels(device: torch.device, version: int | None = None) -> tuple[ModuleType, FlashKernels]:
    """Import the installed FlashAttention for the GPU that will run it, the first of `MODULES` that has the version.

    Args:
        device: where attention runs.
        version: 2 or 3; None for the newest that works.

    Raises:
        ConfigError: there is no such version, none is installed, or the device cannot run it; the message says what was
            tried and how to get it.
    """
    if version not in (None, *GPUS):
        raise ConfigError(f"version is {version!r}; expected 2, 3, or None for the newest that works here.")
    capability = _capability(device)
    wanted = GPUS if version is None else {version: GPUS[version]}
    runs = [number for number, gpus in wanted.items() if capability[0] in gpus.majors]
    if not runs:
        needed = " or ".join(f"FlashAttention-{number} needs {gpus.words}" for number, gpus in wanted.items())
        capability_text = ".".join(map(str, capability))
        raise ConfigError(f"{needed}; {device} has {capability_text}. Use another version, or another backend.")
    problems = []
    for number in runs:
        tried = []
        for name in MODULES:
            found_kernels = kernels_of(name, number)
            if not isinstance(found_kernels, str):
                return found_kernels
            tried.append(f"{name} ({found_kernels})")
        problems.append(f"no FlashAttention-{number} is installed; tried {', '.join(tried)}")
    raise ConfigError(
        f"{'; '.join(problems)}. The registry's vllm-flash-attn is built for torch 2.4; {HOW_TO_INSTALL}."
    )


def kernels_of(name: str, version: int) -> tuple[ModuleType, FlashKernels] | str:
    """Import a module and find its kernels of a version, or return the reason why it cannot serve.

    Args:
        name: of the module, such as one of `MODULES`.
        version: 2 or 3.
    """
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # absent, or built for another torch
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    kernels = VERSION_3 if version == 3 else VERSION_2
    if version == 2 and not hasattr(module, "FA2_AVAILABLE"):
        kernels = VERSION_2_PLAIN
    if kernels.flag is not None and not getattr(module, kernels.flag, False):
        # One of the two libraries of a build may be for another torch; the module that loads them keeps the error.
        loader = getattr(module, "flash_attn_interface", module)
        reason = getattr(loader, f"FA{version}_UNAVAILABLE_REASON", None)
        return f"has no version {version}" + (f": {reason}" if reason else "")
    return missing_argument(module, kernels.needed) or (module, kernels)


def _capability(device: torch.device) -> tuple[int, int]:
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
