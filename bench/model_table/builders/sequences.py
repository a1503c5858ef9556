"""Models of transformers that read a text, an image or speech, and generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_lengths
import tiny_models
import tiny_multimodal
import torch

from bench.model_table.builders.decoders import ENDS
from bench.model_table.builders.model import CPU, Call, Settings, TableModel, configured, noise, prompts, resized
from bench.transformers_generate.families import FAMILIES

T5, SEQUENCES = tiny_models.T5, tiny_lengths.SEQUENCES
STARTS = {"decoder_start_token_id": 0}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12} | STARTS
TWELVE = dict.fromkeys(("encoder_layers", "decoder_layers"), 12)
PROPHET = tiny_models.COMMON | {"hidden_size": 64, "max_position_embeddings": 512, "decoder_start_token_id": 1}
PROPHET |= dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2)
PROPHET |= dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4)
PROPHET |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128)
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"image_size": 16, "patch_size": 4}
# Text as wide as that of a small model of its kind; the image's part stays tiny, since decoding is what is measured.
TEXT = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}


def _whisper(tiny: bool, lengths: list[int], seed: int) -> Call:
    batch = tiny_models.features(len(lengths), CPU, seed)
    if not tiny:
        batch = {"input_features": torch.randn(len(lengths), 80, 3000)}
    return (), batch | {"decoder_input_ids": torch.tensor([[1, 5]] * len(lengths))}


def _of(batch: Callable[..., dict[str, Any]]) -> Callable[[bool, list[int], int], Call]:
    """Return what makes a call of a batch of the tests'; two tokens at least, since BLIP drops the last of a prompt."""
    return lambda tiny, lengths, seed: ((), batch([min(max(length, 2), 64) for length in lengths], CPU, seed))


def _pictured(kind: str, text: str, **more: Any) -> Callable[[bool], Any]:
    """Return a builder of a model with a vision tower and a text model that meet in a projection."""

    def build(tiny: bool) -> Any:
        import transformers

        config = getattr(transformers, f"{kind}Config")
        small = tiny_models.LLAMA | {"model_type": text}
        settings = small if tiny else small | TEXT | {"num_hidden_layers": 8}
        vision = VIT | {"model_type": "clip_vision_model" if kind == "Llava" else "siglip_vision_model"}
        if kind == "Idefics3":
            vision = {name: value for name, value in vision.items() if name != "model_type"}
        if kind == "PaliGemma":
            settings = settings | {"head_dim": 16 if tiny else 64}
            more.update(projection_dim=settings["hidden_size"], hidden_size=settings["hidden_size"])
            vision |= {"projection_dim": settings["hidden_size"], "num_image_tokens": 16}
        made = config(text_config=settings, vision_config=vision, **more)
        return getattr(transformers, f"{kind}ForConditionalGeneration")(made)

    return build


def _with_image_tokens(count: int, **inputs: Any) -> Callable[[bool, list[int], int], Call]:
    """Return what makes prompts that begin with the tokens of one picture each."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        batch = tiny_multimodal.pictures([length + count for length in lengths], CPU, seed)
        batch["input_ids"].clamp_(max=80)
        for row, length in enumerate(lengths):
            start = batch["input_ids"].shape[1] - length - count
            batch["input_ids"][row, start : start + count] = tiny_multimodal.IMAGE
        if inputs.get("nested"):  # several pictures a row
            batch["pixel_values"] = batch["pixel_values"][:, None]
        if inputs.get("types"):
            batch["token_type_ids"] = batch["input_ids"].new_zeros(batch["input_ids"].shape)
        return (), batch

    return call


FLORENCE_TEXT = SEQUENCES | {"model_type": "bart"}


def _florence(tiny: bool) -> Any:
    import transformers

    vision = {"depths": [1, 1], "embed_dim": [16, 32], "num_heads": [2, 2], "num_groups": [2, 2], "drop_path_rate": 0.0}
    vision |= {"patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1], "patch_prenorm": [False, True]}
    vision |= {"window_size": 4, "projection_dim": 64, "max_position_embeddings": 8, "max_temporal_embeddings": 4}
    text = FLORENCE_TEXT if tiny else FLORENCE_TEXT | TWELVE | {"d_model": 768}
    vision["projection_dim"] = text["d_model"]
    config = transformers.Florence2Config(
        text_config=text, vision_config=vision, image_token_id=tiny_multimodal.IMAGE, is_encoder_decoder=True
    )
    return transformers.Florence2ForConditionalGeneration(config)


def _pix2struct(tiny: bool) -> Any:
    import transformers

    text = tiny_models.COMMON | {"hidden_size": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4} | STARTS
    vision = {"hidden_size": 64, "d_kv": 16, "d_ff": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"patch_embed_hidden_size": 12, "seq_len": 64}
    if not tiny:
        text |= {"hidden_size": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12}
        vision |= {"hidden_size": 768, "d_kv": 64, "d_ff": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    config = transformers.Pix2StructConfig(text_config=text, vision_config=vision, is_vqa=False, **STARTS)
    config.eos_token_id, config.pad_token_id = 2, 0
    return transformers.Pix2StructForConditionalGeneration(config)


def _patches(tiny: bool, lengths: list[int], seed: int) -> Call:
    patches = torch.cat([torch.arange(1, 17).repeat(len(lengths), 1)[..., None]] * 2, -1).float()
    flat = torch.cat([patches, noise(len(lengths), 16, 12, seed=seed)], -1)
    mask = torch.ones(len(lengths), 16)
    for row, length in enumerate(lengths):
        mask[row, 16 - length % 8 :] = 0
    return (), {"flattened_patches": flat, "attention_mask": mask, "use_cache": True}  # off in its config


def _sequence(name: str, real: Settings) -> TableModel:
    return TableModel(resized(tiny_lengths.MODELS[name], real), prompts)


def _multimodal(name: str, real: Settings, part: str = "") -> TableModel:
    make, batch = tiny_multimodal.MODELS[name]
    return TableModel(resized(make, real, keep=True), _of(batch), part=part)


QWEN = {"text_config": TEXT | {"layer_types": None, "num_hidden_layers": 8}}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
QWEN["text_config"] |= {"rope_parameters": MROPE, "head_dim": 64}
SPEECH = TWELVE | {"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
SPEECH |= {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "num_hidden_layers": 12}
MOONSHINE = {"hidden_size": 416, "intermediate_size": 1664, "head_dim": 52}
MOONSHINE |= dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 8)
MOONSHINE |= dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 8)
MOONSHINE |= dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 8)
# Without its search for repeated words, which reads every token back to Python.
BLENDERBOT = {"encoder_layers": 2, "decoder_layers": 12, "d_model": 1280, "encoder_no_repeat_ngram_size": 0}
BLIP_TEXT = {"hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 512}
PICTURE = {"image_token_index": tiny_multimodal.IMAGE}
LONG_T5 = T5 | {"local_radius": 4}

MODELS = {
    "t5": TableModel(resized(tiny_models.ENCODER_DECODERS["t5"], T5_BASE), prompts),
    "mt5": TableModel(configured("MT5Config", "MT5ForConditionalGeneration", T5, T5_BASE), prompts),
    "longt5": TableModel(configured("LongT5Config", "LongT5ForConditionalGeneration", LONG_T5, T5_BASE), prompts),
    "bart": _sequence("bart", TWELVE),
    "mbart": _sequence("mbart", TWELVE),
    "pegasus": _sequence("pegasus", TWELVE),
    "marian": _sequence("marian", TWELVE | {"decoder_start_token_id": 0, "vocab_size": 32000, "pad_token_id": 0}),
    "nllb": _sequence("m2m100", TWELVE),
    "m2m100": _sequence("m2m100", TWELVE),
    "led": _sequence("led", {}),
    "blenderbot": _sequence("blenderbot", BLENDERBOT),
    "prophetnet": TableModel(
        configured("ProphetNetConfig", "ProphetNetForConditionalGeneration", PROPHET, {}), prompts
    ),
    "trocr": _sequence("trocr", {"add_cross_attention": False, "is_decoder": True} | ENDS),
    "whisper": TableModel(resized(tiny_models.ENCODER_DECODERS["whisper"], FAMILIES["whisper"].real), _whisper),
    "speech2text": _multimodal("speech2text", SPEECH),
    "moonshine": _multimodal("moonshine", MOONSHINE),
    "qwen2_vl": _multimodal("qwen2_vl", QWEN | {"vision_config": {"hidden_size": 1024}}),
    "qwen2_5_vl": _multimodal("qwen2_5_vl", QWEN | {"vision_config": {"out_hidden_size": 1024}}),
    "qwen3_vl": _multimodal("qwen3_vl", QWEN | {"vision_config": {"out_hidden_size": 1024}}),
    "qwen2_audio": _multimodal(
        "qwen2_audio", {"text_config": TEXT | {"layer_types": None, "num_hidden_layers": 8, "head_dim": None}}
    ),
    "blip": _multimodal("blip", {"text_config": BLIP_TEXT}, "text_decoder"),
    "blip_2": _multimodal(
        "blip2",
        {"text_config": {"hidden_size": 768, "word_embed_proj_dim": 768, "ffn_dim": 3072, "num_hidden_layers": 12}},
        "language_model",
    ),
    "llava": TableModel(
        _pictured("Llava", "llama", **PICTURE, vision_feature_select_strategy="full", vision_feature_layer=-1),
        _with_image_tokens(17),
    ),
    "paligemma": TableModel(_pictured("PaliGemma", "gemma", **PICTURE), _with_image_tokens(16, types=True)),
    "idefics3": TableModel(
        _pictured("Idefics3", "llama", image_token_id=tiny_multimodal.IMAGE, scale_factor=2, pad_token_id=0),
        _with_image_tokens(4, nested=True),
    ),
    "florence2": TableModel(_florence, _with_image_tokens(17)),
    "pix2struct": TableModel(_pix2struct, _patches),
}
