"""What a model's config says of its kind, heads and numbers, in either generation of transformers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LlamaConfig


class LlamaKind(NamedTuple):
    """What sets a model type apart.

    Attributes:
        qkv_bias, o_bias: of the projections around attention; None: as ``config.attention_bias`` says.
        qk_norm: whether the heads of queries and keys are normed before they are rotated.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False


KINDS = {"llama": LlamaKind(), "qwen2": LlamaKind(qkv_bias=True, o_bias=False), "qwen3": LlamaKind(qk_norm=True)}


def llama_kind(config: LlamaConfig) -> LlamaKind:
    """The config's llama_kind.

    Raises:
        ValueError: this is no Llama, or one with attention over a window.
    """
    kind = config.model_type
    if kind not in KINDS:
        raise ValueError(f"model_type is {kind!r}; expected {', '.join(KINDS)}.")
    if getattr(config, "use_sliding_window", False):
        raise ValueError("use_sliding_window is true; attention here is over the whole context.")
    return KINDS[kind]


def config_dtype(config: LlamaConfig) -> torch.dtype:
    """The dtype the config names, float32 where it names none."""
    # `torch_dtype` in transformers 4, `dtype` from 5 on, where reading the old name warns.
    values = vars(config)
    named = values.get("dtype") or values.get("torch_dtype") or values.get("_dtype") or torch.float32
    return getattr(torch, named) if isinstance(named, str) else named
