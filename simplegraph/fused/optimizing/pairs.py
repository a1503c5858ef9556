"""Pairs of a layer and a norm that `optimize` folds, the classes that it knows, and its rewrites by name."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.kinds import IMAGE_KINDS, KINDS
from simplegraph.fused.layers.layer import class_name, hooked, is_sequential, runs_own_forward
from simplegraph.fused.layers.provable import plain_class

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

# Classes whose forward runs with any memory format of its 4-d tensors, since it views none; and their pairs. They go by
# full name, so that no library is imported. A subclass is another class: it may have another forward.
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


def known_pairs_of(module: nn.Module) -> Pairs | None:
    """Return the pairs that a module's forward runs; None if its class is unknown or its forward was replaced."""
    return KNOWN_CLASSES.get(class_name(module)) if runs_own_forward(module) else None


def runs_any_format(module: nn.Module) -> bool:
    """True if every class in the module is known to run with any memory format."""
    return all(map(_any_format, module.modules()))


def _any_format(module: nn.Module) -> bool:
    # torch's own layers take any format: those that reshape, such as Flatten, copy where they must.
    own = type(module).__module__.startswith("torch.nn.") and "forward" not in vars(module)
    return known_pairs_of(module) is not None or is_sequential(module) or own


# The norm that follows each kind of layer, and the dimensions of that layer's batched input.
FOLDABLE: dict[type, tuple[type, int]] = {
    nn.Linear: (nn.BatchNorm1d, 2),
    nn.Conv1d: (nn.BatchNorm1d, 3),
    nn.Conv2d: (nn.BatchNorm2d, 4),
    nn.Conv3d: (nn.BatchNorm3d, 5),
}
NORMS = frozenset(norm for norm, _ in FOLDABLE.values())
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Pair(NamedTuple):
    """A layer and the norm after it, by their names in the whole module; `owner` is the module whose forward runs both.

    Names are "" for the whole module itself.
    """

    owner: str
    layer: str
    norm: str

    def __str__(self) -> str:
        return f"{self.layer} + {self.norm}"


def is_changed(module: nn.Module) -> bool:
    """True if `optimize` changed the module's class, which was not changed again since."""
    return hasattr(type(module), "_simplegraph_plain")


def known_pairs(root: nn.Module) -> list[Pair]:
    """List the pairs that follow from classes alone: neighbours in an `nn.Sequential`, and rows of the table."""
    return [
        Pair(name, _dotted(name, layer), _dotted(name, norm))
        for name, owner in root.named_modules()
        for layer, norm in _neighbours(owner)
        if isinstance(owner._modules[layer], tuple(FOLDABLE)) and isinstance(owner._modules[norm], tuple(NORMS))
    ]


def _neighbours(owner: nn.Module) -> Iterator[tuple[str, str]]:
    if is_sequential(owner):
        yield from itertools.pairwise(owner._modules)
    else:
        pairs = known_pairs_of(owner) or ()
        yield from ((layer, norm) for layer, norm in pairs if {layer, norm} <= owner._modules.keys())


def _dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def shared_modules(root: nn.Module) -> set[int]:
    """Return the ids of modules that have several names below a module."""
    counts = collections.Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    return {module for module, count in counts.items() if count > 1}


def sources(layer: Any, norm: Any) -> list[Tensor]:
    """List the tensors that a folded layer is computed from."""
    tensors = (layer.weight, layer.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    return [tensor for tensor in tensors if tensor is not None]


def watched(layer: Any, norm: Any) -> list[Tensor]:
    """List the tensors whose versions tell of a change to a folded layer.

    A training forward changes running statistics without a new version, but is counted.
    """
    counter = norm.num_batches_tracked
    return sources(layer, norm) + ([] if counter is None else [counter])


def hindrance_in(root: nn.Module, pair: Pair, shared: set[int]) -> str:
    """Say why a pair of a module with these `shared_modules` cannot be folded; "" if it can."""
    layer, norm = root.get_submodule(pair.layer), root.get_submodule(pair.norm)
    if {id(layer), id(norm)} & shared:
        return "one of them has several places in the module"
    return hindrance(layer, norm)


def hindrance(layer: Any, norm: Any) -> str:
    """Say why a norm cannot be folded into the layer before it; "" if it can."""
    expected, _ = FOLDABLE.get(plain_class(layer), (None, 0))
    if expected is None or plain_class(norm) is not expected:
        return f"{type(layer).__name__} and {type(norm).__name__} are no pair, or their class was changed"
    for module in (layer, norm):
        if hooked(module):
            return f"the {type(module).__name__} has hooks, or a forward of its own"
    if norm.running_mean is None or norm.running_var is None:
        return "the norm has no running statistics"
    if layer.weight is None:
        return "the layer has no weight"
    if norm.num_features != layer.weight.shape[0]:
        return f"the norm has {norm.num_features} features, the layer {layer.weight.shape[0]} outputs"
    tensors = sources(layer, norm)
    if len({tensor.device for tensor in tensors}) > 1:
        return "they are on several devices"
    return next(filter(None, map(_odd, tensors)), "")


def _odd(tensor: Tensor) -> str:
    """Say why nothing can be folded into a tensor, or out of it."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a weight is a {type(tensor).__name__}"
    if tensor.dtype not in _DTYPES:
        return f"a weight is of {tensor.dtype}"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return "a weight has no memory of its own"
    # A write to one leaves no trace, so the folded weights could become old.
    return "a weight was made in inference_mode" if tensor.is_inference() else ""
