"""Vision models of transformers: classifiers, detectors, dual encoders, depth, masks, video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.model_table.builders.model import Call, Settings, TableModel, configured, noise, numbers

SIDE, REAL_SIDE, SAM_SIDE = 32, 224, 512
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PATCHES = SMALL | {"image_size": SIDE, "patch_size": 8}
SWIN = {"image_size": SIDE, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
CONVNEXT = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_channels": 3}
SEGFORMER = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 1, 2, 2]}
SEGFORMER |= {"decoder_hidden_size": 32}
WORDS = SMALL | {"vocab_size": 100, "max_position_embeddings": 32, "eos_token_id": 2, "bos_token_id": 1}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
RESNET |= {"out_features": ["stage4"], "layer_type": "basic"}
DETECTOR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 10}
DETECTOR |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
DETECTOR |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)
RT_RESNET = {"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32]}
RT_RESNET |= {"depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
RT_DETR = {"encoder_hidden_dim": 32, "encoder_in_channels": [16, 24, 32], "encoder_layers": 1, "encoder_ffn_dim": 64}
RT_DETR |= {"encoder_attention_heads": 2, "feat_strides": [8, 16, 32], "d_model": 32, "num_queries": 10}
RT_DETR |= {"decoder_in_channels": [32, 32, 32], "decoder_ffn_dim": 64, "decoder_layers": 2, "num_denoising": 0}
RT_DETR |= {"decoder_attention_heads": 2, "decoder_n_points": 2, "anchor_image_size": None, "num_labels": 5}
DINO = PATCHES | {"model_type": "dinov2", "out_features": ["stage1", "stage2"], "apply_layernorm": False}
DINO |= {"reshape_hidden_states": False}


def images(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make an image for each row."""
    side = SIDE if tiny else REAL_SIDE
    return (), {"pixel_values": noise(len(lengths), 3, side, side, seed=seed)}


def _sized(tiny_side: int, real_side: int, *frames: int) -> Callable[[bool, list[int], int], Call]:
    """Return what makes images of these sides, or videos of that many frames."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        side = tiny_side if tiny else real_side
        return (), {"pixel_values": noise(len(lengths), *frames, 3, side, side, seed=seed)}

    return call


def _captioned(words: int, side: int = SIDE) -> Callable[[bool, list[int], int], Call]:
    """Return what makes images with a caption of that many tokens each; `side` is the tiny ones'."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        ids = numbers(100, len(lengths), words, seed=seed)
        ids[:, -1] = 2
        return (), {"input_ids": ids} | _sized(side, REAL_SIDE)(tiny, lengths, seed)[1]

    return call


def _vision(kind: str, tiny: Settings, real: Settings | None = None, head: str = "Model") -> TableModel:
    return TableModel(configured(f"{kind}Config", f"{kind}{head}", tiny, real), images)


def _both(kind: str) -> Callable[[bool], Any]:
    """Return a builder of a model with a text tower and a vision tower."""
    tiny: Settings = {"text_config": WORDS | {"pad_token_id": 0}, "vision_config": PATCHES, "projection_dim": 16}
    side = {"vision_config": {"image_size": REAL_SIDE}}
    return configured(f"{kind}Config", f"{kind}Model", tiny, side)


def _pointed(tiny: bool, lengths: list[int], seed: int) -> Call:
    side, rows = SIDE if tiny else SAM_SIDE, len(lengths)
    points = noise(rows, 1, 2, 2, seed=seed).abs() * side / 4
    return (), {"pixel_values": noise(rows, 3, side, side, seed=seed), "input_points": points}


def _sam(tiny: bool) -> Any:
    import transformers

    vision = SMALL | {"image_size": SIDE, "patch_size": 8, "output_channels": 16, "mlp_dim": 64, "window_size": 2}
    vision |= {"global_attn_indexes": [1], "num_pos_feats": 8}
    prompt = {"hidden_size": 16, "image_size": SIDE, "patch_size": 8, "mask_input_channels": 4}
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    settings = {"vision_config": vision, "prompt_encoder_config": prompt, "mask_decoder_config": decoder}
    real = {"vision_config": {"image_size": SAM_SIDE}, "prompt_encoder_config": {"image_size": SAM_SIDE}}
    return transformers.SamModel(transformers.SamConfig(**(settings if tiny else real)))


def _depth(kind: str, tiny_settings: Settings, real_settings: Settings) -> Callable[[bool], Any]:
    """Return a builder of a depth estimator on a DINOv2 backbone."""

    def build(tiny: bool) -> Any:
        import transformers

        features = {"out_features": ["stage3", "stage6", "stage9", "stage12"]} if not tiny else {}
        backbone = (DINO | {"num_hidden_layers": 4} if tiny else features) | {"reshape_hidden_states": False}
        backbone |= {"model_type": "dinov2", "apply_layernorm": False}
        if tiny:
            backbone |= {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
        made = transformers.Dinov2Config(**{name: value for name, value in backbone.items() if name != "model_type"})
        widths = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16} | tiny_settings
        config = getattr(transformers, f"{kind}Config")(backbone_config=made, **(widths if tiny else real_settings))
        return getattr(transformers, f"{kind}ForDepthEstimation")(config)

    return build


def _dpt(tiny: bool) -> Any:
    import transformers

    settings = PATCHES | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "is_hybrid": False}
    settings |= {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 16}
    config = transformers.DPTConfig(**(settings if tiny else {"image_size": REAL_SIDE}))
    return transformers.DPTForDepthEstimation(config)


def _detr(tiny: bool) -> Any:
    import transformers

    backbone = transformers.ResNetConfig(
        **({name: RESNET[name] for name in RESNET if name != "model_type"} if tiny else {"out_features": ["stage4"]})
    )
    settings = DETECTOR if tiny else {}
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, **settings
    )
    return transformers.DetrForObjectDetection(config)


def _rt_detr(tiny: bool) -> Any:
    import transformers

    if not tiny:
        return transformers.RTDetrForObjectDetection(transformers.RTDetrConfig())
    backbone = transformers.RTDetrResNetConfig(**{name: RT_RESNET[name] for name in RT_RESNET if name != "model_type"})
    return transformers.RTDetrForObjectDetection(transformers.RTDetrConfig(backbone_config=backbone, **RT_DETR))


def _grounding(tiny: bool) -> Any:
    import transformers

    words = transformers.BertConfig(**(WORDS if tiny else {}))
    swin = SWIN | {"depths": [1, 1, 1], "num_heads": [2, 2, 2], "out_features": ["stage2", "stage3"]}
    real = {"image_size": REAL_SIDE, "window_size": 7, "out_features": ["stage2", "stage3", "stage4"]}
    backbone = transformers.SwinConfig(**(swin if tiny else real))
    small = DETECTOR | {"num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2}
    config = transformers.GroundingDinoConfig(backbone_config=backbone, text_config=words, **(small if tiny else {}))
    return transformers.GroundingDinoForObjectDetection(config)


def _queried(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make images with two texts to look for in each."""
    found = images(tiny, lengths, seed)[1]
    return (), {"input_ids": numbers(100, 2 * len(lengths), 8, seed=seed)} | found


VIDEO = PATCHES | {"num_frames": 4, "tubelet_size": 2}

MODELS = {
    "vit": _vision("ViT", PATCHES, head="ForImageClassification"),
    "dinov2": _vision("Dinov2", PATCHES, {"image_size": REAL_SIDE}),
    "deit": _vision("DeiT", PATCHES, head="ForImageClassification"),
    "beit": _vision("Beit", PATCHES, head="ForImageClassification"),
    "swin": _vision("Swin", SWIN, head="ForImageClassification"),
    "convnext": _vision("ConvNext", CONVNEXT, head="ForImageClassification"),
    "clip": TableModel(_both("CLIP"), _captioned(8)),
    "siglip": TableModel(_both("Siglip"), _captioned(8)),
    "segformer": _vision("Segformer", SEGFORMER, head="ForSemanticSegmentation"),
    "dpt": TableModel(_dpt, images),
    "depthanything": TableModel(
        _depth(
            "DepthAnything",
            {"patch_size": 8, "reassemble_hidden_size": 32},
            {"patch_size": 14, "reassemble_hidden_size": 768},
        ),
        images,
    ),
    "owl_vit": TableModel(_both("OwlViT"), _queried, {"exact_shapes": True}),  # two texts to an image
    "detr": TableModel(_detr, _sized(64, 512)),
    "rt_detr": TableModel(_rt_detr, _sized(64, 640)),
    "sam": TableModel(_sam, _pointed),
    "videomae": TableModel(
        configured("VideoMAEConfig", "VideoMAEModel", VIDEO, {}),
        lambda tiny, lengths, seed: _sized(32, 224, 4 if tiny else 16)(tiny, lengths, seed),
    ),
    "groundingdino": TableModel(_grounding, _captioned(8, 64)),
}
