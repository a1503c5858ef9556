"""The models, with random weights: sliding windows in the way of Gemma-3, Mamba2 in the way of Bamba-9B."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bench.models.llama import CacheShape, Llama, build_llama


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model.

    Args:
        config: name of its config's class in transformers.
        full: settings of the shape that steps are measured with; small: of one for comparisons in float32.
        context: tokens in each request's cache in a measured step.
    """

    config: str
    full: dict[str, Any]
    small: dict[str, Any]
    context: int

    def build(self, device: torch.device, *, small: bool) -> Llama:
        """Build the model with random weights, in bfloat16 or small in float32."""
        import transformers

        settings = self.small if small else self.full
        config = getattr(transformers, self.config)(**settings, rms_norm_eps=1e-5, tie_word_embeddings=False)
        dtype = torch.float32 if small else torch.bfloat16
        return build_llama(config, CacheShape(1, 16), 1, device=device, dtype=dtype, seed=3, windows=True)


def _every_sixth_is_full(layers: int) -> list[str]:
    return ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(layers)]


_SMALL = {
    "vocab_size": 997,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "num_hidden_layers": 6,
}
KINDS = {
    "windows": Kind(
        "Qwen3Config",
        # Half of Gemma-3-12B's layers: five with a window to one without, heads of 256 elements, normed.
        {
            "vocab_size": 262_208,
            "hidden_size": 3840,
            "intermediate_size": 15_360,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "use_sliding_window": True,
            "sliding_window": 1024,
            "layer_types": _every_sixth_is_full(24),
        },
        _SMALL
        | {"head_dim": 32, "use_sliding_window": True, "sliding_window": 50, "layer_types": _every_sixth_is_full(6)},
        context=2000,
    ),
    "hybrid": Kind(
        "BambaConfig",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_indices": [9, 18, 27],
            "mamba_n_heads": 128,
            "mamba_d_state": 128,
            "max_position_embeddings": 8192,
        },
        _SMALL | {"attn_layer_indices": [2, 5], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16},
        context=2000,
    ),
}
