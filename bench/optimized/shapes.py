"""The eight models of the comparison, by name: random weights at the shapes that their papers have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """One model; it takes tensors by position and returns one, so that every arm can call it.

    Attributes:
        build: makes the model; called with True for the tiny shape.
        inputs: makes a call's tensors on the CPU in float32; called with the same flag and the number of rows.
        package: the package that must be installed.
    """

    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool, int], tuple[Tensor, ...]]
    package: str

    def optimized(self, module: Any) -> nn.Module:
        """Return the part that a user would optimize: the library's own model."""
        return getattr(module, "model", module)  # type: ignore[no-any-return]


class Sample(nn.Module):
    """A denoiser of diffusers that takes its arguments by position and returns the sample."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        sample: Tensor = self.model(**dict(zip(self.names, tensors, strict=True))).sample
        return sample


class LastHidden(nn.Module):
    """An encoder of transformers that returns only its last hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.model(input_ids=input_ids).last_hidden_state
        return hidden


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

    shape: dict[str, Any] = {"sample_size": 64, "cross_attention_dim": 768}  # Stable Diffusion 1.5's
    if tiny:
        shape = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4}
        shape |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 12}
        shape |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4}
    return Sample(UNet2DConditionModel(**shape), "sample", "timestep", "encoder_hidden_states")


def _noisy(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    side, words = (16, (5, 12)) if tiny else (64, (77, 768))
    return torch.randn(rows, 4, side, side), torch.tensor(500), torch.randn(rows, *words)


def _dit(tiny: bool) -> nn.Module:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2 if tiny else 16,
        attention_head_dim=4 if tiny else 72,
        in_channels=4,
        out_channels=8,
        num_layers=2 if tiny else 28,  # the larger is DiT-XL/2 at 256 pixels
        sample_size=8 if tiny else 32,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
    )
    return Sample(model, "hidden_states", "timestep", "class_labels")


def _classed(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    side = 8 if tiny else 32
    return torch.randn(rows, 4, side, side), torch.full((rows,), 500), torch.randint(0, 1000, (rows,))


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return LastHidden(BertModel(BertConfig(**(shape if tiny else {}))))  # the larger is BERT-base


def _words(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    return (torch.randint(1, 1000, (rows, 16 if tiny else 128)),)


def _of_torchvision(name: str) -> ComparedModel:
    return ComparedModel(functools.partial(_torchvision, name), _images, "torchvision")


# The slowest to compile come first, side by side.
MODELS: dict[str, ComparedModel] = {
    "unet": ComparedModel(_unet, _noisy, "diffusers"),
    "dit": ComparedModel(_dit, _classed, "diffusers"),
    "efficientnet": _of_torchvision("efficientnet_b0"),
    "resnet50": _of_torchvision("resnet50"),
    "convnext": ComparedModel(_convnext, _images, "torchvision"),
    "vit": ComparedModel(_vit, _images, "torchvision"),
    "bert": ComparedModel(_bert, _words, "transformers"),
    "resnet18": _of_torchvision("resnet18"),
}


def available(models: Mapping[str, ComparedModel] = MODELS) -> list[str]:
    """List the names of models whose package can be imported."""
    return [name for name, model in models.items() if _imports(model.package)]


def _imports(package: str) -> bool:
    try:
        __import__(package)
    except (ImportError, RuntimeError):  # torchvision raises RuntimeError if built for another torch
        return False
    return True
