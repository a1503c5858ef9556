"""Reads a model's kind and dtype from its config, of either generation of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import LlamaConfig


class LlamaKind(NamedTuple):
    """The properties in which a model type differs from others.

    Attributes:
        qkv_bias, o_bias: biases of the projections around attention; None follows ``config.attention_bias``.
        qk_norm: True if the heads of queries and keys are normed before they are rotated.
        renamed: parts of parameters' names in the type's checkpoints, with the names that they have here.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    renamed: tuple[tuple[str, str], ...] = ()


KINDS = {
    "llama": LlamaKind(),
    "qwen2": LlamaKind(qkv_bias=True, o_bias=False),
    "qwen3": LlamaKind(qk_norm=True),
    "mistral": LlamaKind(qkv_bias=False, o_bias=False),
    "bamba": LlamaKind(
        renamed=(
            (".feed_forward.", ".mlp."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            ("model.final_layernorm.", "model.norm."),
        )
    ),
}


def llama_kind(config: LlamaConfig) -> LlamaKind:
    """Return the kind of Llama that the config describes.

    Raises:
        ValueError: the config is of no Llama.
    """
    kind = config.model_type
    if kind not in KINDS:
        raise ValueError(f"model_type is {kind!r}; expected {', '.join(KINDS)}.")
    return KINDS[kind]


def attention_window(config: LlamaConfig, layer: int) -> int | None:
    """Return the keys that a token of a layer sees, its own included; None for all before it."""
    if not getattr(config, "use_sliding_window", True):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return window if kinds[layer] == "sliding_attention" else None
    return window if layer >= (getattr(config, "max_window_layers", None) or 0) else None


def is_recurrent(config: LlamaConfig, layer: int) -> bool:
    """True if a layer has a recurrence (Mamba2) in place of attention."""
    return config.model_type == "bamba" and layer not in (getattr(config, "attn_layer_indices", None) or ())


def load_config(folder: Path | str) -> LlamaConfig:
    """Load a folder's config.json."""
    from transformers import AutoConfig  # which takes longer to import than torch

    config: LlamaConfig = AutoConfig.from_pretrained(folder)
    return config


def config_dtype(config: LlamaConfig) -> torch.dtype:
    """Return the config's dtype, float32 if it names none."""
    # `torch_dtype` in transformers 4, `dtype` from 5 on, where reading the old name warns.
    values = vars(config)
    named = values.get("dtype") or values.get("torch_dtype") or values.get("_dtype") or torch.float32
    return getattr(torch, named) if isinstance(named, str) else named
