"""Image models of timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.model_table.builders.model import Call, Settings, TableModel, image_pairs, noise


def _timm(name: str, side: int = 64, **small: Any) -> TableModel:
    """Return a model of timm; `small` are its tiny shape's arguments, `side` that of its tiny images."""

    def build(tiny: bool) -> Any:
        import timm

        return timm.create_model(name, pretrained=False, **(small if tiny else {}))

    return TableModel(build, _square(side))


def _square(side: int, real_side: int = 224) -> Callable[[bool, list[int], int], Call]:
    """Return what makes images of these sides, by position."""

    def call(tiny: bool, lengths: list[int], seed: int) -> Call:
        return (noise(len(lengths), 3, *[side if tiny else real_side] * 2, seed=seed),), {}

    return call


def _torchvision(
    name: str,
    home: str = "",
    small: Settings | None = None,
    call: Callable[[bool, list[int], int], Call] | None = None,
    **settings: Any,
) -> TableModel:
    """Return a model of torchvision, from the folder `home` of its models, and the settings that its user gives."""

    def build(tiny: bool) -> Any:
        import torchvision

        place = getattr(torchvision.models, home) if home else torchvision.models
        without = {"weights": None} | ({"weights_backbone": None} if home in ("detection", "segmentation") else {})
        return getattr(place, name)(**without, **((small or {}) if tiny else {}))

    return TableModel(build, call or _square(64), settings)


def _listed(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make a list of images, as torchvision's detectors take them."""
    side = 64 if tiny else 320
    return ([noise(3, side, side, seed=seed + at).sigmoid() for at in range(len(lengths))],), {}


def _detector(name: str, small: Settings | None = None) -> TableModel:
    """Return a detector: a list of images is its batch, so that no tensor has a batch dimension."""
    return _torchvision(name, "detection", small, _listed, exact_shapes=True)


def _frames(tiny: bool, lengths: list[int], seed: int) -> Call:
    side, frames = (32, 4) if tiny else (112, 16)
    return (noise(len(lengths), 3, frames, side, side, seed=seed),), {}


def _landmarks(tiny: bool) -> Any:
    """Load the trained network that finds the eyes, nose and mouth in crops of faces; it lies in its package."""
    import facenet_pytorch

    return facenet_pytorch.ONet()


TINY_SIDE = {"min_size": 64, "max_size": 64}
VIT = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 4}

MODELS = {
    "timm_resnet50": _timm("resnet50", layers=(1, 1, 1, 1)),
    "timm_convnext_tiny": _timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)),
    "timm_efficientnet_b0": _timm("efficientnet_b0"),
    "timm_vit_base": _timm("vit_base_patch16_224", 32, **VIT),
    "timm_swin_tiny": _timm(
        "swin_tiny_patch4_window7_224", 32, img_size=32, embed_dim=16, depths=(1, 1), num_heads=(2, 2), window_size=4
    ),
    "timm_mobilenetv3": _timm("mobilenetv3_small_100"),
    "timm_regnety": _timm("regnety_002"),
    "timm_deit3": _timm("deit3_small_patch16_224", 32, **VIT),
    "timm_eva02": _timm("eva02_tiny_patch14_224", 28, **(VIT | {"img_size": 28})),
    "timm_maxvit": _timm("maxvit_tiny_tf_224", 64, img_size=64, embed_dim=(32, 32, 64, 64), depths=(1, 1, 1, 1)),
    "timm_coatnet": _timm("coatnet_0_rw_224", 64, img_size=64),
    "timm_densenet121": _timm("densenet121", block_config=(2, 2, 2, 2)),
    "timm_mixer_b16": _timm("mixer_b16_224", 32, img_size=32),
    "timm_levit": _timm("levit_128s", 224),
    "timm_xcit": _timm("xcit_nano_12_p16_224", 32, **VIT),
    "torchvision_resnet18": _torchvision("resnet18"),
    "torchvision_mobilenet_v3": _torchvision("mobilenet_v3_small"),
    "torchvision_vit_b_16": _torchvision("vit_b_16", small={"image_size": 64}, call=_square(64)),
    "torchvision_swin_t": _torchvision("swin_t"),
    "torchvision_convnext_tiny": _torchvision("convnext_tiny"),
    "torchvision_deeplabv3": _torchvision("deeplabv3_mobilenet_v3_large", "segmentation"),
    "torchvision_fcn": _torchvision("fcn_resnet50", "segmentation"),
    "torchvision_raft": _torchvision("raft_small", "optical_flow", call=image_pairs(128, 256)),
    "torchvision_r3d_18": _torchvision("r3d_18", "video", call=_frames),
    "torchvision_fasterrcnn": _detector("fasterrcnn_mobilenet_v3_large_320_fpn", TINY_SIDE),
    "torchvision_retinanet": _detector("retinanet_resnet50_fpn", TINY_SIDE),
    "torchvision_ssdlite": _detector("ssdlite320_mobilenet_v3_large"),
    "facenet_pytorch_landmarks": TableModel(_landmarks, _square(48, 48)),
}
