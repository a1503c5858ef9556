"""Tiny models, with random weights, whose forwards make tensors on the CPU and move them to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Callable[[int, Any], dict[str, Tensor]]


def falcon(*, alibi: bool = False) -> tuple[nn.Module, Inputs]:
    from transformers import FalconConfig, FalconModel

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"alibi": alibi, "use_cache": False, "attn_implementation": "eager"}
    model = FalconModel(FalconConfig(**sizes, **settings, ffn_hidden_size=64, bos_token_id=1, eos_token_id=2))

    def inputs(rows: int, device: Any) -> dict[str, Tensor]:
        mask = torch.ones(rows, 8, dtype=torch.long, device=device)
        return {"input_ids": torch.randint(0, 64, (rows, 8), device=device), "attention_mask": mask}

    return model, inputs


def falcon_alibi() -> tuple[nn.Module, Inputs]:
    return falcon(alibi=True)


def wavlm() -> tuple[nn.Module, Inputs]:
    from transformers import WavLMConfig, WavLMModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2)}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "num_buckets": 32}
    model = WavLMModel(WavLMConfig(**sizes, **convolutions, **positions, max_bucket_distance=80))
    return model, lambda rows, device: {"input_values": torch.randn(rows, 800, device=device)}


def videomae() -> tuple[nn.Module, Inputs]:
    from transformers import VideoMAEConfig, VideoMAEModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = VideoMAEModel(VideoMAEConfig(**sizes, image_size=32, patch_size=16, num_frames=4, tubelet_size=2))
    return model, lambda rows, device: {"pixel_values": torch.randn(rows, 4, 3, 32, 32, device=device)}


def sam() -> tuple[nn.Module, Inputs]:
    from transformers import SamConfig, SamModel

    vision = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 64}
    prompts = {"hidden_size": 16, "image_size": 64, "patch_size": 16, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder |= {"iou_head_hidden_dim": 16, "iou_head_depth": 2}
    vision |= {"num_pos_feats": 8}
    model = SamModel(
        SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)  # type: ignore[arg-type]
    )

    def inputs(rows: int, device: Any) -> dict[str, Tensor]:
        points = torch.rand(rows, 1, 4, 2, device=device) * 64
        return {"pixel_values": torch.randn(rows, 3, 64, 64, device=device), "input_points": points}

    return model, inputs


def rt_detr() -> tuple[nn.Module, Inputs]:
    from transformers import RTDetrConfig, RTDetrModel, RTDetrResNetConfig

    stages = {"depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"]}
    backbone = RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 32], layer_type="basic", **stages)
    encoder = {"encoder_hidden_dim": 32, "encoder_in_channels": [16, 32, 32], "encoder_ffn_dim": 64}
    decoder = {"decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 64, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_n_points": 2}
    queries = {"num_queries": 8, "num_labels": 4, "num_denoising": 0, "anchor_image_size": [64, 64]}
    model = RTDetrModel(RTDetrConfig(backbone_config=backbone, d_model=32, **encoder, **decoder, **heads, **queries))
    return model, lambda rows, device: {"pixel_values": torch.randn(rows, 3, 64, 64, device=device)}


def raft() -> tuple[nn.Module, Inputs]:
    from torchvision.models.optical_flow import raft_small

    def inputs(rows: int, device: Any) -> dict[str, Tensor]:
        return {name: torch.randn(rows, 3, 128, 128, device=device) for name in ("image1", "image2")}

    return raft_small(weights=None), inputs


def deberta_v2() -> tuple[nn.Module, Inputs]:
    from transformers import DebertaV2Config, DebertaV2Model

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    attention = {
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    }
    places = {"pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "max_relative_positions": -1}
    model = DebertaV2Model(DebertaV2Config(**sizes, **attention, **places, intermediate_size=64))

    def inputs(rows: int, device: Any) -> dict[str, Tensor]:
        mask = torch.ones(rows, 8, dtype=torch.long, device=device)
        return {"input_ids": torch.randint(0, 64, (rows, 8), device=device), "attention_mask": mask}

    return model, inputs


def gpt_oss() -> tuple[nn.Module, Inputs]:
    from transformers import GptOssConfig, GptOssModel

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    settings = {"sliding_window": 4, "max_position_embeddings": 64, "use_cache": False}
    model = GptOssModel(GptOssConfig(**sizes, **heads, **settings, attn_implementation="eager"))
    return model, lambda rows, device: {"input_ids": torch.randint(0, 64, (rows, 8), device=device)}
