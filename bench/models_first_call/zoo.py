"""Models other than language models, by name: random weights, one call each, at a real shape or a tiny one.

Half of them need no package. All take tensors by position and return one tensor, so that every arm can call them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Entry:
    """One model.

    Args:
        build: makes the model; called with True for the tiny shape.
        inputs: makes a call's tensors on the CPU in float32; called with the same flag and the number of rows.
        package: the package that must be installed; None for none.
    """

    build: Callable[[bool], nn.Module]
    inputs: Callable[[bool, int], tuple[Tensor, ...]]
    package: str | None = None


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class SmallUNet(nn.Module):
    """A small UNet with skip connections and a timestep."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(depth + 1)]
        pairs = list(itertools.pairwise(widths))
        self.enter = nn.Conv2d(4, channels, 3, padding=1)
        self.time = nn.Linear(1, widths[-1])
        self.blocks = nn.ModuleList(Residual(width) for width in widths[:-1])
        self.down = nn.ModuleList(nn.Conv2d(narrow, wide, 3, stride=2, padding=1) for narrow, wide in pairs)
        self.middle = nn.Sequential(Residual(widths[-1]), Residual(widths[-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, stride=2) for narrow, wide in pairs)
        self.leave = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        hidden, across = self.enter(sample), []
        for block, down in zip(self.blocks, self.down, strict=True):
            hidden = block(hidden)
            across.append(hidden)
            hidden = down(hidden)
        hidden = self.middle(hidden + self.time(timestep[:, None])[:, :, None, None])
        for up, other in zip(reversed(self.up), reversed(across), strict=True):
            hidden = up(hidden) + other
        leave: Tensor = self.leave(hidden)
        return leave


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


def _convnet(tiny: bool) -> nn.Module:
    channels, depth = (8, 2) if tiny else (128, 16)
    blocks = [Residual(channels) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(3, channels, 4, stride=4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)
    )


def _transformer(tiny: bool) -> nn.Module:
    width, heads, depth = (32, 4, 2) if tiny else (768, 12, 12)
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def _timm(name: str, small: dict[str, Any]) -> Callable[[bool], nn.Module]:
    def build(tiny: bool) -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, pretrained=False, **(small if tiny else {}))
        return model

    return build


def _resnet18(tiny: bool) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.resnet18(weights=None)
    return model


def _unet(tiny: bool) -> nn.Module:
    from diffusers import UNet2DConditionModel

    widths = (8, 16) if tiny else (320, 640, 1280)  # the larger is of the size of Stable Diffusion's
    model = UNet2DConditionModel(
        sample_size=16 if tiny else 64,
        layers_per_block=1 if tiny else 2,
        block_out_channels=widths,
        norm_num_groups=4 if tiny else 32,
        down_block_types=("CrossAttnDownBlock2D",) * (len(widths) - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (len(widths) - 1),
        cross_attention_dim=12 if tiny else 768,
        attention_head_dim=4 if tiny else 8,
    )
    return Sample(model, "sample", "timestep", "encoder_hidden_states")


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


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertModel

    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return LastHidden(BertModel(BertConfig(**(shape if tiny else {}))))  # the larger is BERT-base


def _images(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    side = 32 if tiny else 224
    return (torch.randn(rows, 3, side, side),)


def _latents(rows: int, side: int) -> Tensor:
    return torch.randn(rows, 4, side, side)


ZOO: dict[str, Entry] = {
    "convnet": Entry(_convnet, _images),
    "transformer": Entry(_transformer, lambda tiny, rows: (torch.randn(rows, *((8, 32) if tiny else (197, 768))),)),
    "unet": Entry(
        lambda tiny: SmallUNet(8, 1) if tiny else SmallUNet(64, 3),
        lambda tiny, rows: (_latents(rows, 8 if tiny else 64), torch.rand(rows)),
    ),
    "timm vit": Entry(
        _timm("vit_small_patch16_224", {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 4}), _images, "timm"
    ),
    "timm convnext": Entry(_timm("convnext_tiny", {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}), _images, "timm"),
    "torchvision resnet18": Entry(_resnet18, _images, "torchvision"),
    "diffusers unet": Entry(
        _unet,
        lambda tiny, rows: (
            _latents(rows, 16 if tiny else 64),
            torch.tensor(500),
            torch.randn(rows, *((5, 12) if tiny else (77, 768))),
        ),
        "diffusers",
    ),
    "diffusers dit": Entry(
        _dit,
        lambda tiny, rows: (
            _latents(rows, 8 if tiny else 32),
            torch.full((rows,), 500),
            torch.randint(0, 1000, (rows,)),
        ),
        "diffusers",
    ),
    "transformers bert": Entry(
        _bert, lambda tiny, rows: (torch.randint(1, 1000, (rows, 16 if tiny else 128)),), "transformers"
    ),
}


def available() -> list[str]:
    """List the names of models whose package is installed."""
    return [name for name, entry in ZOO.items() if entry.package is None or imports(entry.package)]


def imports(package: str) -> bool:
    """True if a package can be imported."""
    try:
        __import__(package)
    except (ImportError, RuntimeError):  # torchvision raises RuntimeError if built for another torch
        return False
    return True
