"""FlashAttention's kernels of versions 2 and 3: where they are looked for, and how their builds differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simplegraph.base.config import AttentionCGSupport

MODULES = ("vllm_flash_attn", "vllm.vllm_flash_attn", "flash_attn_interface", "flash_attn")


class Gpus(NamedTuple):
    """The GPUs that run a version: their major compute capabilities, and the same in words."""

    majors: range
    words: str


GPUS = {  # by version, in the order in which they are tried
    3: Gpus(range(9, 10), "a Hopper GPU (compute capability 9)"),
    2: Gpus(range(8, 100), "an Ampere GPU or newer (compute capability 8)"),
}
_CALLED = ("max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "block_table", "softmax_scale", "causal")


@dataclasses.dataclass(frozen=True)
class FlashKernels:
    """The kernels of one version, and how a build calls them.

    Attributes:
        version: of FlashAttention.
        support: the steps that they can run in a full graph.
        flag: the attribute by which a module says that it has them; None for modules that have no others.
        needed: functions that are called, and the arguments that they are passed.
        constants: arguments of every call.
        lse: the argument that asks for the log-sum-exp.
        has_schedule: True if the work is scheduled ahead, by `get_scheduler_metadata`.
        has_sinks: True if they add sinks to the scores.
        is_plain: True for the project's own build, which returns a new tensor instead of writing to `out`, and reads
            the offsets of each request's keys instead of their numbers.
        page_multiple: tokens of which a page holds a multiple.
    """

    version: int
    support: AttentionCGSupport
    flag: str | None
    needed: Mapping[str, Sequence[str]]
    constants: Mapping[str, Any]
    lse: str
    has_schedule: bool = False
    has_sinks: bool = False
    is_plain: bool = False
    page_multiple: int = 1


VERSION_3 = FlashKernels(
    version=3,
    support=AttentionCGSupport.ALWAYS,
    flag="FA3_AVAILABLE",
    needed={
        "flash_attn_varlen_func": (
            *_CALLED,
            *("seqused_k", "out", "fa_version", "return_softmax_lse", "scheduler_metadata", "num_splits"),
        ),
        "get_scheduler_metadata": (
            *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "cache_seqlens"),
            *("qkv_dtype", "cu_seqlens_q", "page_size", "causal", "num_splits"),
        ),
    },
    constants={"fa_version": 3},
    lse="return_softmax_lse",
    has_schedule=True,
    has_sinks=True,
)
# With one query token for each request, the kernels of version 2 treat query heads as tokens, split the keys, and do
# not read query lengths. Other calls do none of this, so decodes would be slow in a graph for mixed batches.
VERSION_2 = FlashKernels(
    version=2,
    support=AttentionCGSupport.UNIFORM_BATCH,
    flag="FA2_AVAILABLE",
    needed={"flash_attn_varlen_func": (*_CALLED, "seqused_k", "out", "fa_version", "return_softmax_lse")},
    constants={"fa_version": 2},
    lse="return_softmax_lse",
    page_multiple=16,
)
# As FlashAttention's own project publishes them.
VERSION_2_PLAIN = dataclasses.replace(
    VERSION_2,
    flag=None,
    needed={"flash_attn_varlen_func": (*_CALLED, "cu_seqlens_k", "return_attn_probs")},
    constants={},
    lse="return_attn_probs",
    is_plain=True,
    page_multiple=256,
)
