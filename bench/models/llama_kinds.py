"""Reads a model's kind and dtype from its config, of either generation of transformers."""

from __future__ import annotations

import contextlib
import json
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

if TYPE_CHECKING:
    from transformers import LlamaConfig


class LlamaKind(NamedTuple):
    """The properties in which a model type differs from others.

    Attributes:
        qkv_bias, o_bias: biases of the projections around attention; None follows ``config.attention_bias``.
        qk_norm: True if the heads of queries and keys are normed before they are rotated.
        renamed: parts of parameters' names in the type's checkpoints, with the names that they have here.
        stated: what a config.json must say, beside `STATED`, to be read without transformers; None if it cannot be.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    stated: tuple[str, ...] | None = ()


# Values that a model reads and for which transformers' defaults would count if a config.json left them out.
STATED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("hidden_act", "rms_norm_eps", "initializer_range", "vocab_size", "tie_word_embeddings", "eos_token_id"),
)
_WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers")

KINDS = {
    "llama": LlamaKind(),
    "qwen2": LlamaKind(qkv_bias=True, o_bias=False, stated=_WINDOWS),
    "qwen3": LlamaKind(qk_norm=True, stated=("head_dim", "attention_bias", *_WINDOWS)),
    "mistral": LlamaKind(qkv_bias=False, o_bias=False, stated=("sliding_window",)),
    "bamba": LlamaKind(
        stated=None,
        renamed=(
            (".feed_forward.", ".mlp."),
            (".pre_ff_layernorm.", ".post_attention_layernorm."),
            ("model.final_layernorm.", "model.norm."),
        ),
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
    """Load a folder's config.json; by transformers only if it leaves out what the model reads."""
    found = read_config(folder)
    if found is not None:
        return found
    from transformers import AutoConfig  # which takes longer to import than torch

    config: LlamaConfig = AutoConfig.from_pretrained(folder)
    return config


def read_config(folder: Path | str) -> LlamaConfig | None:
    """Read a config.json that states everything that the model reads; None for another one."""
    values: Any = None
    with contextlib.suppress(OSError, ValueError):
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = KINDS.get(values.get("model_type", "")) if isinstance(values, dict) else None
    if kind is None or kind.stated is None or not values.keys() >= {*STATED, *kind.stated}:
        return None
    if "partial_rotary_factor" in values or None in (values["num_key_value_heads"], values.get("head_dim", 0)):
        return None  # written in a way that transformers reads differently from generation to generation
    found = types.SimpleNamespace(**values)
    if getattr(found, "use_sliding_window", True) is False:
        found.sliding_window = None
    return cast("LlamaConfig", found)


def config_dtype(config: LlamaConfig) -> torch.dtype:
    """Return the config's dtype, float32 if it names none."""
    # `torch_dtype` in transformers 4, `dtype` from 5 on, where reading the old name warns.
    values = vars(config)
    named = values.get("dtype") or values.get("torch_dtype") or values.get("_dtype") or torch.float32
    return getattr(torch, named) if isinstance(named, str) else named
