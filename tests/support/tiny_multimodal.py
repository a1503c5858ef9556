"""Tiny models of transformers that read images or speech, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_models as tiny
import torch
import transformers
from tiny_lengths import SEQUENCES
from torch import Tensor

Batch = dict[str, Tensor]
IMAGE, VIDEO, VISION_START, VISION_END = 90, 91, 92, 93
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT = tiny.LLAMA | {"rope_parameters": MROPE}
QWEN = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}

VISION = {"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 64}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(lengths: list[int], device: torch.device, seed: int = 1, counts: list[int] | None = None) -> Batch:
    """Rows of images of 4 by 4 patches, one or as many as `counts` says, and then text, padded on the left."""
    counts = counts or [1] * len(lengths)
    totals = [length + 6 * count for length, count in zip(lengths, counts, strict=True)]
    batch = tiny.prompts(totals, device, seed)
    ids = batch["input_ids"].clamp_(max=80)
    for row, (total, count) in enumerate(zip(totals, counts, strict=True)):
        start = ids.shape[1] - total
        ids[row, start : start + 6 * count] = torch.tensor([VISION_START, *[IMAGE] * 4, VISION_END] * count)
    pixels = torch.randn(16 * sum(counts), 3 * 2 * 4 * 4, generator=_generator(seed)).to(device)
    grid = torch.tensor([[1, 4, 4]] * sum(counts), device=device)
    types = (ids == IMAGE).int()
    return batch | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}


def pictures(lengths: list[int], device: torch.device, seed: int = 1) -> Batch:
    """Prompts, and one picture of 16 by 16 for each."""
    pixels = torch.randn(len(lengths), 3, 16, 16, generator=_generator(seed)).to(device)
    return tiny.prompts(lengths, device, seed) | {"pixel_values": pixels}


def speech(lengths: list[int], device: torch.device, seed: int = 1) -> Batch:
    """Feature frames of different lengths, padded on the right."""
    frames = [8 * length for length in lengths]
    mask = torch.tensor([[1] * count + [0] * (max(frames) - count) for count in frames], device=device)
    features = torch.randn(len(lengths), max(frames), 8, generator=_generator(seed)).to(device)
    return {"input_features": features, "attention_mask": mask}


def waves(lengths: list[int], device: torch.device, seed: int = 1) -> Batch:
    """Samples of different lengths, padded on the right."""
    samples = [1500 + 400 * length for length in lengths]
    mask = torch.tensor([[1] * count + [0] * (max(samples) - count) for count in samples], device=device)
    values = torch.randn(len(lengths), max(samples), generator=_generator(seed)).to(device)
    return {"input_values": values * mask, "attention_mask": mask}


def audio(lengths: list[int], device: torch.device, seed: int = 1) -> Batch:
    """Prompts with two audio tokens each, and the features that they stand for."""
    batch = tiny.prompts([length + 2 for length in lengths], device, seed)
    ids = batch["input_ids"].clamp_(max=80)
    for row, length in enumerate(lengths):
        ids[row, ids.shape[1] - length - 2 : ids.shape[1] - length] = IMAGE
    features = torch.randn(len(lengths), 8, 8, generator=_generator(seed)).to(device)
    return batch | {"input_features": features, "feature_attention_mask": torch.ones_like(features[:, 0]).long()}


def _qwen(kind: str, **vision: Any) -> Callable[[], Any]:
    def make() -> Any:
        text = TEXT | (tiny.HEADS if kind == "Qwen3VL" else {})
        config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=PATCHES | vision, **QWEN)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(config)

    return make


def _qwen_audio() -> Any:
    encoder = {"num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    encoder |= {"d_model": 32, "max_source_positions": 4}
    text = tiny.LLAMA | {"model_type": "qwen2"}
    config = transformers.Qwen2AudioConfig(audio_config=encoder, text_config=text, audio_token_index=IMAGE)
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _blip2() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    former = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    former |= {"encoder_hidden_size": 32, "vocab_size": 100}
    text = tiny.COMMON | {"hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"max_position_embeddings": 512, "word_embed_proj_dim": 64, "model_type": "opt"}
    config = transformers.Blip2Config(
        vision_config=vision, qformer_config=former, text_config=text, num_query_tokens=3, image_token_index=IMAGE
    )
    return transformers.Blip2ForConditionalGeneration(config)


def _blip() -> Any:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 4}
    text = {"vocab_size": 100, "hidden_size": 32, "encoder_hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "sep_token_id": 2}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.BlipForConditionalGeneration(transformers.BlipConfig(vision_config=vision, text_config=text))


def _speech2text() -> Any:
    settings = SEQUENCES | {"max_source_positions": 200, "max_target_positions": 200, "input_feat_per_channel": 8}
    settings |= {"conv_channels": 16, "num_conv_layers": 2}
    return transformers.Speech2TextForConditionalGeneration(transformers.Speech2TextConfig(**settings))


def _moonshine() -> Any:
    settings = tiny.COMMON | {"hidden_size": 64, "intermediate_size": 128, "decoder_start_token_id": 1}
    settings |= dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2)
    settings |= dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4)
    return transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig(**settings))


def _gpt_oss() -> Any:
    settings = tiny.LLAMA | tiny.HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings))


MODELS: dict[str, tuple[Callable[[], Any], Callable[..., Batch]]] = {
    "qwen2_vl": (_qwen("Qwen2VL", embed_dim=32, hidden_size=64), images),
    "qwen2_5_vl": (_qwen("Qwen2_5_VL", **VISION, fullatt_block_indexes=[1], window_size=8), images),
    "qwen3_vl": (_qwen("Qwen3VL", **VISION, deepstack_visual_indexes=[0], num_position_embeddings=16), images),
    "qwen2_audio": (_qwen_audio, audio),
    "speech2text": (_speech2text, speech),
    "moonshine": (_moonshine, waves),
    "blip": (_blip, pictures),
    "blip2": (_blip2, pictures),
    "gpt_oss": (_gpt_oss, tiny.prompts),
}
