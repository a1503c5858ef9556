"""Denoisers, autoencoders and pipelines of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_denoisers import CONDITIONED, DIT, PLAIN

from bench.model_table.builders.model import Call, Settings, TableModel, noise, numbers

ATTENDED = CONDITIONED | {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
    "use_linear_projection": True,
}
XL = {
    "sample_size": 64,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 4),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}
STABLE = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
DIT_XL = DIT | {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28, "sample_size": 32}
PIXART = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8, "caption_channels": 12}
PIXART |= {"cross_attention_dim": 16}
SD3 = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8}
SD3 |= {"num_attention_heads": 2, "joint_attention_dim": 12, "caption_projection_dim": 16, "pooled_projection_dim": 16}
SD3 |= {"out_channels": 4, "pos_embed_max_size": 16}
FLUX = {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
FLUX |= {"joint_attention_dim": 12, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8), "patch_size": 1}
AUTO = {"block_out_channels": (8, 16), "norm_num_groups": 4, "latent_channels": 4}
AUTO |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
KL = AUTO | {"block_out_channels": (128, 256, 512, 512), "norm_num_groups": 32}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
ONE_BY_ONE = {"capture_sizes": [1, 2, 3, 4]}  # it returns a loss over all rows, so none may be added
STEPS = (981, 500, 20, 1)


def _model(name: str, tiny: Settings, real: Settings) -> Callable[[bool], Any]:
    def build(is_tiny: bool) -> Any:
        import diffusers

        return getattr(diffusers, name)(**(tiny if is_tiny else real))

    return build


def _latents(
    tiny_side: int, real_side: int, words: tuple[int, int] | None = None, first: str = "sample", channels: int = 4
) -> Callable[[bool, list[int], int], Call]:
    """Return what makes latents, the timestep as a tensor, and for models of text its hidden states."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        rows, side = len(lengths), tiny_side if tiny else real_side
        given = {first: noise(rows, channels, side, side, seed=seed), "timestep": torch.tensor(STEPS[seed % 4])}
        if words:
            width = words[0] if tiny else words[1]
            given["encoder_hidden_states"] = noise(rows, 5 if tiny else 77, width, seed=seed)
        return (), given

    return call


def _labelled(tiny: bool, lengths: list[int], seed: int) -> Call:
    given = _latents(8, 32, first="hidden_states")(tiny, lengths, seed)[1]
    rows = len(lengths)
    return (), given | {
        "timestep": torch.full((rows,), STEPS[seed % 4] % 100),
        "class_labels": numbers(90, rows, seed=seed),
    }


def _pixart(tiny: bool, lengths: list[int], seed: int) -> Call:
    given = _latents(8, 64, (12, 4096), "hidden_states")(tiny, lengths, seed)[1]
    given["timestep"] = torch.full((len(lengths),), STEPS[seed % 4])
    sizes = {"resolution": noise(len(lengths), 2, seed=seed), "aspect_ratio": noise(len(lengths), 1, seed=seed)}
    return (), given | {"added_cond_kwargs": dict.fromkeys(sizes) if tiny else sizes}


def _xl(tiny: bool, lengths: list[int], seed: int) -> Call:
    given = _latents(16, 64, (12, 2048))(tiny, lengths, seed)[1]
    rows, wide = len(lengths), 16 if tiny else 1280
    ids = torch.tensor([[16.0, 16, 0, 0, 16, 16]] * rows)
    return (), given | {"added_cond_kwargs": {"text_embeds": noise(rows, wide, seed=seed), "time_ids": ids}}


def _sd3(tiny: bool, lengths: list[int], seed: int) -> Call:
    given = _latents(8, 64, (12, 4096), "hidden_states", 4 if tiny else 16)(tiny, lengths, seed)[1]
    given["timestep"] = torch.full((len(lengths),), float(STEPS[seed % 4]))
    return (), given | {"pooled_projections": noise(len(lengths), 16 if tiny else 2048, seed=seed)}


def _flux(tiny: bool, lengths: list[int], seed: int) -> Call:
    rows, side, words = len(lengths), 4 if tiny else 32, 5 if tiny else 64
    channels, wide, pooled = (4, 12, 16) if tiny else (64, 4096, 768)
    places = torch.zeros(side, side, 3)
    places[..., 1] += torch.arange(side)[:, None]
    places[..., 2] += torch.arange(side)[None]
    return (), {
        "hidden_states": noise(rows, side * side, channels, seed=seed),
        "encoder_hidden_states": noise(rows, words, wide, seed=seed),
        "pooled_projections": noise(rows, pooled, seed=seed),
        "timestep": torch.full((rows,), STEPS[seed % 4] / 1000),
        "img_ids": places.reshape(-1, 3),
        "txt_ids": torch.zeros(words, 3),
        "guidance": torch.full((rows,), 3.5) if not tiny else None,
    }


def _pictures(tiny: bool, lengths: list[int], seed: int) -> Call:
    side = 16 if tiny else 256
    return (), {"sample": noise(len(lengths), 3, side, side, seed=seed)}


def _controlled(tiny: bool, lengths: list[int], seed: int) -> Call:
    given = _latents(16, 64, (12, 768))(tiny, lengths, seed)[1]
    side = 8 * given["sample"].shape[-1]
    return (), given | {"controlnet_cond": noise(len(lengths), 3, side, side, seed=seed)}


# Pipelines.


def _words(tiny: bool, kind: str = "CLIPTextModel", **more: Any) -> Any:
    import transformers

    small = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    real = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    settings = (small if tiny else real) | {"vocab_size": 100, "max_position_embeddings": 77, "eos_token_id": 2} | more
    return getattr(transformers, kind)(transformers.CLIPTextConfig(**settings))


def _stable(tiny: bool) -> Any:
    import diffusers

    return diffusers.StableDiffusionPipeline(
        vae=_model("AutoencoderKL", AUTO, KL)(tiny),
        text_encoder=_words(tiny),
        tokenizer=None,
        unet=_model("UNet2DConditionModel", CONDITIONED, STABLE)(tiny),
        scheduler=diffusers.DDIMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _adapted(tiny: bool) -> Any:
    import peft

    pipe = _stable(tiny)
    linear = {"r": 4, "target_modules": ["to_q", "to_v"], "init_lora_weights": False}
    pipe.unet.add_adapter(peft.LoraConfig(**linear))
    return pipe


def _stable_xl(tiny: bool) -> Any:
    import diffusers

    return diffusers.StableDiffusionXLPipeline(
        vae=_model("AutoencoderKL", AUTO, KL)(tiny),
        text_encoder=_words(tiny),
        text_encoder_2=_words(tiny, "CLIPTextModelWithProjection", projection_dim=16 if tiny else 1280),
        tokenizer=None,
        tokenizer_2=None,
        unet=_model("UNet2DConditionModel", ATTENDED, XL)(tiny),
        scheduler=diffusers.DDIMScheduler(),
        add_watermarker=False,
    )


def _ddpm(tiny: bool) -> Any:
    import diffusers

    return diffusers.DDPMPipeline(
        unet=_model("UNet2DModel", PLAIN, PLAIN_REAL)(tiny), scheduler=diffusers.DDPMScheduler()
    )


def _prompted(width: tuple[int, int], pooled: tuple[int, int] | None = None) -> Callable[[bool, list[int], int], Call]:
    """Return what calls a pipeline with the hidden states of its prompts, since there is no tokenizer here."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        rows, side = len(lengths), 32 if tiny else 512
        shape = (5 if tiny else 77, width[0] if tiny else width[1])
        given: dict[str, Any] = {
            "prompt_embeds": noise(rows, *shape, seed=seed),
            "negative_prompt_embeds": noise(rows, *shape, seed=seed + 100),
            "num_inference_steps": 4 if tiny else 10,
            "height": side,
            "width": side,
            "output_type": "pt",
            "return_dict": False,
        }
        if pooled:
            wide = pooled[0] if tiny else pooled[1]
            given["pooled_prompt_embeds"] = noise(rows, wide, seed=seed)
            given["negative_pooled_prompt_embeds"] = noise(rows, wide, seed=seed + 100)
        return (), given

    return call


def _unprompted(tiny: bool, lengths: list[int], seed: int) -> Call:
    settings = {"num_inference_steps": 4 if tiny else 10, "output_type": "np", "return_dict": False}
    return (), {"batch_size": len(lengths)} | settings


PLAIN_REAL = {"sample_size": 64}
CONTROL = {name: value for name, value in CONDITIONED.items() if name not in ("sample_size", "up_block_types")}
CONTROL |= {"conditioning_embedding_out_channels": (4, 8, 8, 8)}
VQ = AUTO | {"sample_size": 16, "num_vq_embeddings": 16}

MODELS = {
    "diffusers_unet2d": TableModel(_model("UNet2DModel", PLAIN, PLAIN_REAL), _latents(16, 64, channels=3)),
    "diffusers_unet2dcondition": TableModel(
        _model("UNet2DConditionModel", CONDITIONED, STABLE), _latents(16, 64, (12, 768))
    ),
    "diffusers_sdxl_unet": TableModel(_model("UNet2DConditionModel", ATTENDED, XL), _xl),
    "diffusers_dit": TableModel(_model("DiTTransformer2DModel", DIT, DIT_XL), _labelled),
    "diffusers_pixart": TableModel(
        _model("PixArtTransformer2DModel", PIXART, {"sample_size": 64, "caption_channels": 4096, "num_layers": 8}),
        _pixart,
    ),
    "diffusers_sd3": TableModel(_model("SD3Transformer2DModel", SD3, {"num_layers": 8, "sample_size": 64}), _sd3),
    "diffusers_flux": TableModel(
        _model("FluxTransformer2DModel", FLUX, {"num_layers": 2, "num_single_layers": 4, "guidance_embeds": True}),
        _flux,
    ),
    "diffusers_autoencoderkl": TableModel(_model("AutoencoderKL", AUTO, KL), _pictures),
    "diffusers_controlnet": TableModel(_model("ControlNetModel", CONTROL, {"cross_attention_dim": 768}), _controlled),
    "diffusers_vqmodel": TableModel(
        _model("VQModel", VQ, VQ | {"block_out_channels": (64, 128)}), _pictures, ONE_BY_ONE
    ),
    "diffusers_stablediffusion": TableModel(_stable, _prompted((12, 768))),
    "diffusers_stablediffusionxl": TableModel(_stable_xl, _prompted((12, 2048), (16, 1280))),
    "diffusers_stablediffusion_lora": TableModel(_adapted, _prompted((12, 768))),
    "diffusers_ddpm": TableModel(_ddpm, _unprompted),
}
