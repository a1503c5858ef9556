"""The one table of what `optimize` may do, and of the classes whose forward is known to it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from simplegraph.fused.layers.table import IMAGE_KINDS, KINDS
from simplegraph.fused.layers.written import plain_class, runs_as_written

BATCH_NORM, CHANNELS_LAST, EPILOGUE, PROJECTIONS = "batch_norm", "channels_last", "epilogue", "projections"
REWRITES: Mapping[str, str] = MappingProxyType(
    {
        BATCH_NORM: "norm folded into the convolution or linear layer before it",
        CHANNELS_LAST: "weights of 2-d convolutions stored in torch.channels_last",
        EPILOGUE: "bias, sum and activation after a folded convolution computed in one kernel",
        PROJECTIONS: "projections of an attention that read the same input computed as one product",
        **KINDS,
        **IMAGE_KINDS,
    }
)


# Names of a child and of the norm that directly follows it and alone reads its output.
Pairs = tuple[tuple[str, str], ...]
_STEM: Pairs = (("conv1", "bn1"),)
_BASIC: Pairs = (*_STEM, ("conv2", "bn2"))
_BOTTLENECK: Pairs = (*_BASIC, ("conv3", "bn3"))
_CONV_BN: Pairs = (("conv", "bn"),)
_NAMED: Pairs = (("convolution", "normalization"),)

# Classes without such pairs, by the files where they are written.
_WITHOUT_PAIRS: Mapping[str, str] = MappingProxyType(
    {
        "torchvision.ops.misc": "Permute SqueezeExcitation",
        "torchvision.ops.stochastic_depth": "StochasticDepth",
        "torchvision.models.convnext": "ConvNeXt CNBlock LayerNorm2d",
        "torchvision.models.efficientnet": "EfficientNet MBConv FusedMBConv",
        "torchvision.models.vision_transformer": "VisionTransformer Encoder EncoderBlock MLPBlock",
        "diffusers.models.activations": "GEGLU GELU",
        "diffusers.models.attention": "BasicTransformerBlock FeedForward",
        "diffusers.models.attention_processor": "Attention",
        "diffusers.models.downsampling": "Downsample2D",
        "diffusers.models.embeddings": (
            "CombinedTimestepLabelEmbeddings LabelEmbedding PatchEmbed TimestepEmbedding Timesteps"
        ),
        "diffusers.models.normalization": "AdaLayerNormZero",
        "diffusers.models.resnet": "ResnetBlock2D",
        "diffusers.models.transformers.dit_transformer_2d": "DiTTransformer2DModel",
        "diffusers.models.transformers.transformer_2d": "Transformer2DModel",
        "diffusers.models.unets.unet_2d_blocks": (
            "CrossAttnDownBlock2D CrossAttnUpBlock2D DownBlock2D UNetMidBlock2DCrossAttn UpBlock2D"
        ),
        "diffusers.models.unets.unet_2d_condition": "UNet2DConditionModel",
        "diffusers.models.upsampling": "Upsample2D",
    }
)

# Classes whose forward runs with any memory format of its 4-d tensors, since it views none, and the pairs in it.
# They go by full name, so that no library is imported. A subclass is another class: it may have another forward.
KNOWN_CLASSES: Mapping[str, Pairs] = MappingProxyType(
    {
        **{f"{file}.{name}": () for file, names in _WITHOUT_PAIRS.items() for name in names.split()},
        "torchvision.models.resnet.ResNet": _STEM,
        "torchvision.models.resnet.BasicBlock": _BASIC,
        "torchvision.models.resnet.Bottleneck": _BOTTLENECK,
        "torchvision.models.googlenet.BasicConv2d": _CONV_BN,
        "torchvision.models.inception.BasicConv2d": _CONV_BN,
        "timm.models.resnet.ResNet": _STEM,
        "timm.models.resnet.BasicBlock": _BASIC,
        "timm.models.resnet.Bottleneck": _BOTTLENECK,
        "transformers.models.resnet.modeling_resnet.ResNetConvLayer": _NAMED,
        "transformers.models.resnet.modeling_resnet.ResNetShortCut": _NAMED,
    }
)


def full_name(module: nn.Module) -> str:
    """Return the name of a module's class with that of the file where it is written."""
    kind = plain_class(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def runs_own_forward(module: nn.Module) -> bool:
    """True if a module's forward is that of its class, as it is written where the class is."""
    kind = plain_class(module)
    own = "forward" not in vars(module) and kind.forward.__module__ == kind.__module__
    return own and runs_as_written(module)


def known_pairs_of(module: nn.Module) -> Pairs | None:
    """Return the pairs that a module's forward runs; None if its class is unknown or its forward was replaced."""
    return KNOWN_CLASSES.get(full_name(module)) if runs_own_forward(module) else None


def is_sequential(module: nn.Module) -> bool:
    """True if calls of the module run its children one after another, and nothing else."""
    kind = plain_class(module)
    return (
        isinstance(module, nn.Sequential)
        and "forward" not in vars(module)
        and kind.forward is nn.Sequential.forward
        and runs_as_written(module)
        and kind.__iter__ is nn.Sequential.__iter__
    )


def runs_any_format(module: nn.Module) -> bool:
    """True if every class in the module is known to run with any memory format."""
    return all(map(_any_format, module.modules()))


def _any_format(module: nn.Module) -> bool:
    # torch's own layers take any format: those that reshape, such as Flatten, copy where they must.
    own = type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
    return known_pairs_of(module) is not None or is_sequential(module) or own
