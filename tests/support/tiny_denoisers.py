"""Settings of tiny denoisers of diffusers, which tests and the table of models share."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "sample_size": 16,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
# Of UNet2DConditionModel, with hidden states of a text that are `WIDTH` wide.
WIDTH = 12
CONDITIONED = SMALL | {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": WIDTH,
}
# Of UNet2DModel.
PLAIN = SMALL | {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
# Of DiTTransformer2DModel.
DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 100,
    "norm_type": "ada_norm_zero",
    "norm_elementwise_affine": False,
}
