"""Blocks of convolutions in channels_last, whose norms, activations, biases and sums run as fewer kernels."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from simplegraph.fused.layers.denoisers import shared
from simplegraph.fused.layers.layer import (
    AsWritten,
    Layer,
    arguments_of,
    class_name,
    hooked,
    is_plain,
    is_pointwise,
    runs_as_written,
)
from simplegraph.fused.torch_operators import Adapted, Grouped, KernelTrial, Operators

IMAGE_BLOCK = "image_block"
DEPTH, _PERMUTE = "torchvision.ops.stochastic_depth.StochasticDepth", "torchvision.ops.misc.Permute"
_PERCEPTRON = ("normalization.LayerNorm", "linear.Linear", "activation.GELU", "linear.Linear")
_CONVNEXT = ["torch.nn.modules.conv.Conv2d", _PERMUTE, *(f"torch.nn.modules.{name}" for name in _PERCEPTRON), _PERMUTE]
FINISHING: Mapping[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu"}  # activations after a convolution
# Arguments of a transformer of images: those that must be absent, and those that its blocks get.
_MASKS = ("attention_mask", "encoder_attention_mask", "return_dict")
_PASSED = ("encoder_hidden_states", "timestep", "cross_attention_kwargs", "class_labels")


def _convnext_layer(module: Any) -> Layer | None:
    fits = (
        class_name(module.stochastic_depth) == DEPTH
        and type(module.block) is nn.Sequential
        and list(map(class_name, module.block)) == _CONVNEXT
        and [module.block[at].dims for at in (1, 6)] == [[0, 2, 3, 1], [0, 3, 1, 2]]
        and all(weight is not None for weight in (module.block[0].bias, module.block[2].weight, module.block[2].bias))
    )
    if not fits:
        return None
    trial = KernelTrial("adapt", (len(module.block[2].weight), "weight", "bias", "row"))
    bypassed = ("block", *(f"block.{at}" for at in (0, 1, 2, 6)), "stochastic_depth")
    return Layer(IMAGE_BLOCK, (trial,), functools.partial(_convnext, module), 4, bypassed)


def _convnext(module: Any, operators: Operators, x: Tensor) -> Tensor:
    if len(module.block) != 7 or module.stochastic_depth.training:
        raise AsWritten
    convolution, _, norm, wide, active, narrow, _ = module.block
    out = convolution._conv_forward(x, convolution.weight, None)
    images, channels, height, width = out.shape
    rows = out.permute(0, 2, 3, 1).reshape(images, height * width, channels)
    normed, _ = operators.adapt(rows, Adapted(norm.eps, norm.weight, norm.bias, convolution.bias))
    result = narrow(active(wide(normed))).view(images, height, width, channels).permute(0, 3, 1, 2)
    return torch.addcmul(x, module.layer_scale, result)


def _excitation_layer(module: Any) -> Layer | None:
    narrow, wide, kind = module.fc1, module.fc2, FINISHING.get(type(module.activation))
    pool, last = module.avgpool, module.scale_activation
    fits = type(pool) is nn.AdaptiveAvgPool2d and pool.output_size in (1, (1, 1)) and type(last) is nn.Sigmoid
    if not fits or kind is None or not all(map(_is_linear, (narrow, wide))):
        return None
    trial = KernelTrial("excite", (narrow.in_channels, narrow.out_channels, kind))
    bypassed = ("fc1", "fc2", "activation", "scale_activation")
    return Layer(IMAGE_BLOCK, (trial,), functools.partial(_excitation, module, kind), 4, bypassed)


def _is_linear(convolution: Any) -> bool:
    return type(convolution) is nn.Conv2d and convolution.bias is not None and is_pointwise(convolution)


def _excitation(module: Any, kind: str, operators: Operators, x: Tensor) -> Tensor:
    if "_scale" in vars(module):
        raise AsWritten
    means = module.avgpool(x).flatten(1)
    narrow, wide = ((layer.weight.flatten(1), layer.bias) for layer in (module.fc1, module.fc2))
    return operators.excite(means, narrow, wide, kind)[:, :, None, None] * x


def _residual_layer(module: Any) -> Layer | None:
    norms = (module.norm1, module.norm2)
    kinds = [type(part) for part in (*norms, module.conv1, module.conv2, module.nonlinearity)]
    fits = (
        kinds == [nn.GroupNorm, nn.GroupNorm, nn.Conv2d, nn.Conv2d, nn.SiLU]
        and all(norm.affine for norm in norms)
        and module.time_embedding_norm == "default"
        and module.upsample is None
        and module.downsample is None
    )
    if not fits:
        return None
    trials = [KernelTrial("activated_group_norm", (norm.num_channels, norm.num_groups)) for norm in norms]
    trials.append(KernelTrial("finish", ("", 1)))
    bypassed = ("norm1", "norm2", "conv1", "conv2", "nonlinearity")
    return Layer(IMAGE_BLOCK, tuple(trials), functools.partial(_residual, module), bypassed=bypassed)


def _residual(module: Any, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or not is_plain(args[0], 4):
        raise AsWritten
    first, second, active = module.conv1, module.conv2, module.nonlinearity
    x, embedding = args
    added = None
    if module.time_emb_proj is not None:
        given = embedding if module.skip_time_act else shared(module, embedding, "silu", lambda: active(embedding))
        added = module.time_emb_proj(given)
    elif embedding is not None:
        raise AsWritten
    hidden = operators.group_norm(x, _activated(module.norm1))
    hidden = first._conv_forward(hidden, first.weight, None)
    hidden = operators.group_norm(hidden, _activated(module.norm2, row=first.bias, added=added))
    hidden = second._conv_forward(module.dropout(hidden), second.weight, None)
    shortcut = x
    if _is_linear(module.conv_shortcut) and not hooked(module.conv_shortcut):
        shortcut = operators.pointwise(x, module.conv_shortcut.weight, module.conv_shortcut.bias, "")
    elif module.conv_shortcut is not None:
        shortcut = module.conv_shortcut(x)
    hidden = operators.finish(hidden, second.bias, shortcut, "")
    return hidden if module.output_scale_factor == 1 else hidden / module.output_scale_factor


def _activated(norm: Any, **added: Any) -> Grouped:
    return Grouped(norm.num_groups, norm.eps, norm.weight, norm.bias, kind="silu", **added)


def _transformer_layer(module: Any) -> Layer | None:
    projections = (module.proj_in, module.proj_out)
    if not module.is_input_continuous or not all(
        type(projection) is nn.Linear or _is_linear(projection) for projection in projections
    ):
        return None
    run = functools.partial(_transformer, module, inspect.signature(type(module).forward))
    return Layer(IMAGE_BLOCK, (), run, bypassed=("proj_in", "proj_out"))


def _transformer(module: Any, signature: inspect.Signature, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    """Run its projections as linear layers of pixels: an image in channels_last is a list of pixels."""
    given, first, last = arguments_of(signature, module, *args, **kwargs), module.proj_in, module.proj_out
    x = given["hidden_states"]
    others = any(given[name] is not None and given[name] is not False for name in _MASKS)
    if others or not is_plain(x, 4):
        raise AsWritten
    images, channels, height, width = x.shape
    rows = module.norm(x).permute(0, 2, 3, 1).reshape(images, height * width, channels)
    rows = F.linear(rows, first.weight.flatten(1), first.bias)
    for block in module.transformer_blocks:
        rows = block(rows, **{name: given[name] for name in _PASSED})
    rows = F.linear(rows, last.weight.flatten(1), last.bias)
    return (rows.view(images, height, width, channels).permute(0, 3, 1, 2) + x,)


IMAGE_CLASSES = {
    "torchvision.models.convnext.CNBlock": _convnext_layer,
    "torchvision.ops.misc.SqueezeExcitation": _excitation_layer,
    "diffusers.models.resnet.ResnetBlock2D": _residual_layer,
    "diffusers.models.transformers.transformer_2d.Transformer2DModel": _transformer_layer,
}

# Group norms of images: torch's own copies images in channels_last to another format, and its result with them.


def group_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the group norms of a model, of torch's own class, to their layers."""
    norms: list[Any] = [norm for norm in model.modules() if type(norm) is nn.GroupNorm and runs_as_written(norm)]
    return {norm: Layer("group_norm", _trials(norm), functools.partial(_normalize, norm), 4) for norm in norms}


def _trials(module: Any) -> tuple[KernelTrial, ...]:
    return (KernelTrial("group_norm", (module.num_channels, module.num_groups)),) if module.affine else ()


def _normalize(module: Any, operators: Operators, x: Tensor) -> Tensor:
    return operators.group_norm(x, Grouped(module.num_groups, module.eps, module.weight, module.bias))
