"""The eight models of the comparison, by name: random weights at the shapes that their papers have."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from bench.models_first_call.zoo import ZOO, Entry, Sample, imports


@dataclasses.dataclass(frozen=True)
class ComparedModel(Entry):
    """One model; see `Entry`.

    Attributes:
        at_most: the limit of its time over the compiler's.
    """

    at_most: float = 1.5

    def optimized(self, module: Any) -> nn.Module:
        """Return the part that a user would optimize: the library's own model."""
        return getattr(module, "model", module)  # type: ignore[no-any-return]


def _images(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    side = 32 if tiny else 224
    return (torch.randn(rows, 3, side, side),)


def _torchvision(name: str, tiny: bool) -> nn.Module:
    from torchvision import models

    return _settled(getattr(models, name)(weights=None))


def _settled(model: nn.Module) -> nn.Module:
    """Give weights that are ones or zeros at first values as trained ones have them: else their layers do nothing."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0.0, 0.2)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.5, 1.5)  # type: ignore[arg-type]
            nn.init.uniform_(module.weight, 0.5, 1.0)
        if isinstance(scale := getattr(module, "layer_scale", None), nn.Parameter):
            nn.init.uniform_(scale, 0.1, 0.3)
    return model


def _convnext(tiny: bool) -> nn.Module:
    from torchvision.models import convnext

    if not tiny:
        return _torchvision("convnext_tiny", tiny)
    settings = [convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 1)]
    return _settled(convnext.ConvNeXt(settings, num_classes=10))


def _vit(tiny: bool) -> nn.Module:
    from torchvision.models import VisionTransformer

    if not tiny:
        return _torchvision("vit_b_16", tiny)
    return _settled(VisionTransformer(32, 16, 2, 2, 32, 64, num_classes=10))


def _unet(tiny: bool) -> nn.Module:
    from diffusers import UNet2DConditionModel

    if tiny:
        return ZOO["diffusers unet"].build(tiny)
    model = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)  # Stable Diffusion 1.5's
    return Sample(model, "sample", "timestep", "encoder_hidden_states")


def _zoo(name: str, at_most: float = 1.5) -> ComparedModel:
    return ComparedModel(**vars(ZOO[name]), at_most=at_most)


def _of_torchvision(name: str, at_most: float = 1.5) -> ComparedModel:
    return ComparedModel(functools.partial(_torchvision, name), _images, "torchvision", at_most)


# The slowest to compile come first, side by side.
MODELS: dict[str, ComparedModel] = {
    "unet": ComparedModel(_unet, ZOO["diffusers unet"].inputs, "diffusers"),
    "dit": _zoo("diffusers dit"),
    "efficientnet": _of_torchvision("efficientnet_b0"),
    "resnet50": _of_torchvision("resnet50"),
    "convnext": ComparedModel(_convnext, _images, "torchvision"),
    "vit": ComparedModel(_vit, _images, "torchvision", 1.15),
    "bert": _zoo("transformers bert", 1.15),
    "resnet18": _of_torchvision("resnet18", 1.15),
}


def available() -> list[str]:
    """List the names of models whose package is installed."""
    return [name for name, model in MODELS.items() if imports(str(model.package))]
