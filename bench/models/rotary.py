"""Rotary positions: frequencies from a config, cosines and sines, and the rotation of heads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import LlamaConfig


class RotaryEmbedding(nn.Module):
    """Rotary positions; the frequencies of the ``default`` and ``llama3`` kinds."""

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("inv_freq", torch.empty(rotary_dim(config) // 2), persistent=False)

    def reset(self) -> None:
        """Fill the frequencies, in radians per token."""
        self.inv_freq.copy_(inverse_frequencies(self.config))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute cosines and sines, (T, 1, rotary_dim), of positions (T,), or (3, T): time, height, width (M-RoPE)."""
        angles = positions.float()[..., None, None] * self.inv_freq
        if positions.dim() == 2:
            parts = angles.split(mrope_section(self.config), dim=-1)
            angles = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def head_dim(config: LlamaConfig) -> int:
    """Return the elements per head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_dim(config: LlamaConfig) -> int:
    """Return the elements per head that are rotated."""
    return int(head_dim(config) * _rope_parameters(config).get("partial_rotary_factor", 1.0))


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions, (T, 1, rotary_dim) from `RotaryEmbedding`, to heads (T, num_heads, head_dim).

    The first `rotary_dim` elements are rotated, the others stay.
    """
    size = cos.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat((rotate(heads[..., :size], cos, sin), heads[..., size:]), dim=-1)
    # The halves are swapped; the sign that belongs to this is in `sin`.
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((second, first), dim=-1) * sin


def mrope_section(config: LlamaConfig) -> list[int]:
    """Return the numbers of frequencies for time, height and width.

    Raises:
        ValueError: the config has no such numbers, or their sum is wrong.
    """
    sections = list(_rope_parameters(config).get("mrope_section", ()))
    if len(sections) != 3 or sum(sections) != head_dim(config) // 2:
        raise ValueError(
            f"mrope_section is {sections} for {head_dim(config) // 2} frequencies; positions of shape (3, T) need "
            "three numbers with that sum."
        )
    return sections


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Compute the frequencies, (rotary_dim / 2,) float32, in radians per token.

    Raises:
        ValueError: the config's kind of rotary scaling is not supported.

    Source: the llama3 rule is that of the Llama 3.1 model card, as in transformers' ``rope_utils``.
    """
    rope = _rope_parameters(config)
    size = rotary_dim(config)
    frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    if rope["rope_type"] == "default":
        return frequencies
    if rope["rope_type"] == "llama3":
        return _llama3(frequencies, rope)
    raise ValueError(f"rope_type is {rope['rope_type']!r}; this Llama knows 'default' and 'llama3'.")


def _rope_parameters(config: LlamaConfig) -> dict[str, Any]:
    """Return base and scaling, from a config of either generation of transformers."""
    rope = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    return rope


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and blend smoothly between them."""
    old_context, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    blend = ((old_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / rope["factor"] + blend * frequencies
