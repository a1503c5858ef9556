"""Blocks of convolutions in channels_last, whose norms, activations, biases and sums run as fewer kernels."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from simplegraph.fused.layers.classes import Bypassed, class_name, is_plain, is_pointwise, of_classes
from simplegraph.fused.layers.layer import Forward, Layer, arguments_of
from simplegraph.fused.layers.shared import shared
from simplegraph.fused.layers.written import hooked
from simplegraph.fused.torch_operators import Adapted, Grouped, KernelTrial, Operators

IMAGE_BLOCK = "image_block"
_DEPTH, _PERMUTE = "torchvision.ops.stochastic_depth.StochasticDepth", "torchvision.ops.misc.Permute"
_KINDS = {nn.ReLU: "relu", nn.SiLU: "silu"}
# Arguments of a transformer of images: those that must be absent, and those that its blocks get.
_MASKS = ("attention_mask", "encoder_attention_mask", "return_dict")
_PASSED = ("encoder_hidden_states", "timestep", "cross_attention_kwargs", "class_labels")


def image_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map ConvNeXt's blocks, squeeze and excitation, and blocks of denoisers to their layers."""
    return of_classes(
        model,
        {
            "torchvision.models.convnext.CNBlock": _convnext_layer,
            "torchvision.ops.misc.SqueezeExcitation": _excitation_layer,
            "diffusers.models.resnet.ResnetBlock2D": _residual_layer,
            "diffusers.models.transformers.transformer_2d.Transformer2DModel": _transformer_layer,
        },
    )


def _convnext_layer(module: Any) -> Layer | None:
    parts = list(module.block)
    if type(module.block) is not nn.Sequential or len(parts) != 7 or class_name(module.stochastic_depth) != _DEPTH:
        return None
    convolution, first, norm, wide, active, narrow, last = parts
    if {class_name(first), class_name(last)} != {_PERMUTE} or [first.dims, last.dims] != [[0, 2, 3, 1], [0, 3, 1, 2]]:
        return None
    kinds = [type(each) for each in (convolution, norm, wide, active, narrow)]
    if kinds != [nn.Conv2d, nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear] or convolution.bias is None:
        return None
    if norm.weight is None or norm.bias is None:
        return None
    trial = KernelTrial("adapt", (len(norm.weight), "weight", "bias", "row"))
    bypassed = Bypassed(module, "block", *(f"block.{at}" for at in (0, 1, 2, 6)), "stochastic_depth")
    return Layer(IMAGE_BLOCK, (trial,), functools.partial(_convnext, module, bypassed))


def _convnext(module: Any, parts: Bypassed, operators: Operators, original: Forward, *args: Any, **kwargs: Any) -> Any:
    plain = parts.are_plain() and len(module.block) == 7 and not module.stochastic_depth.training
    if kwargs or len(args) != 1 or not is_plain(args[0], 4) or not plain:
        return original(*args, **kwargs)
    convolution, _, norm, wide, active, narrow, _ = module.block
    out = convolution._conv_forward(args[0], convolution.weight, None)
    images, channels, height, width = out.shape
    rows = out.permute(0, 2, 3, 1).reshape(images, height * width, channels)
    normed, _ = operators.adapt(rows, Adapted(norm.eps, norm.weight, norm.bias, convolution.bias))
    result = narrow(active(wide(normed))).view(images, height, width, channels).permute(0, 3, 1, 2)
    return torch.addcmul(args[0], module.layer_scale, result)


def _excitation_layer(module: Any) -> Layer | None:
    narrow, wide, kind = module.fc1, module.fc2, _KINDS.get(type(module.activation))
    pool, last = module.avgpool, module.scale_activation
    if type(pool) is not nn.AdaptiveAvgPool2d or pool.output_size not in (1, (1, 1)) or type(last) is not nn.Sigmoid:
        return None
    if kind is None or not all(map(_is_linear, (narrow, wide))):
        return None
    trial = KernelTrial("excite", (narrow.in_channels, narrow.out_channels, kind))
    parts = Bypassed(module, "fc1", "fc2", "activation", "scale_activation")
    return Layer(IMAGE_BLOCK, (trial,), functools.partial(_excitation, module, kind, parts))


def _is_linear(convolution: Any) -> bool:
    return type(convolution) is nn.Conv2d and convolution.bias is not None and is_pointwise(convolution)


def _excitation(
    module: Any, kind: str, parts: Bypassed, operators: Operators, original: Forward, *args: Any, **kwargs: Any
) -> Any:
    plain = parts.are_plain() and "_scale" not in vars(module)
    if kwargs or len(args) != 1 or not is_plain(args[0], 4) or not plain:
        return original(*args, **kwargs)
    means = module.avgpool(args[0]).flatten(1)
    narrow, wide = ((each.weight.flatten(1), each.bias) for each in (module.fc1, module.fc2))
    return operators.excite(means, narrow, wide, kind)[:, :, None, None] * args[0]


def _residual_layer(module: Any) -> Layer | None:
    norms = (module.norm1, module.norm2)
    kinds = [type(each) for each in (*norms, module.conv1, module.conv2, module.nonlinearity)]
    if kinds != [nn.GroupNorm, nn.GroupNorm, nn.Conv2d, nn.Conv2d, nn.SiLU] or not all(norm.affine for norm in norms):
        return None
    if module.time_embedding_norm != "default" or module.upsample is not None or module.downsample is not None:
        return None
    trials = [KernelTrial("activated_group_norm", (norm.num_channels, norm.num_groups)) for norm in norms]
    parts = Bypassed(module, "norm1", "norm2", "conv1", "conv2", "nonlinearity")
    trials.append(KernelTrial("finish", ("", 1)))
    return Layer(IMAGE_BLOCK, tuple(trials), functools.partial(_residual, module, parts))


def _residual(module: Any, parts: Bypassed, operators: Operators, original: Forward, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 2 or not is_plain(args[0], 4) or not parts.are_plain():
        return original(*args, **kwargs)
    first, second, active = module.conv1, module.conv2, module.nonlinearity
    x, embedding = args
    added = None
    if module.time_emb_proj is not None:
        given = embedding if module.skip_time_act else shared(module, embedding, "silu", lambda: active(embedding))
        added = module.time_emb_proj(given)
    elif embedding is not None:
        return original(*args)
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
    if not module.is_input_continuous or not all(type(each) is nn.Linear or _is_linear(each) for each in projections):
        return None
    signature, parts = inspect.signature(type(module).forward), Bypassed(module, "proj_in", "proj_out")
    return Layer(IMAGE_BLOCK, (), functools.partial(_transformer, module, signature, parts))


def _transformer(
    module: Any,
    signature: inspect.Signature,
    parts: Bypassed,
    operators: Operators,
    original: Forward,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run its projections as linear layers of pixels: an image in channels_last is a list of those."""
    given, first, last = arguments_of(signature, module, *args, **kwargs), module.proj_in, module.proj_out
    x = given["hidden_states"]
    others = any(given[name] is not None and given[name] is not False for name in _MASKS)
    if others or not is_plain(x, 4) or not parts.are_plain():
        return original(*args, **kwargs)
    images, channels, height, width = x.shape
    rows = module.norm(x).permute(0, 2, 3, 1).reshape(images, height * width, channels)
    rows = F.linear(rows, first.weight.flatten(1), first.bias)
    for block in module.transformer_blocks:
        rows = block(rows, **{name: given[name] for name in _PASSED})
    rows = F.linear(rows, last.weight.flatten(1), last.bias)
    return (rows.view(images, height, width, channels).permute(0, 3, 1, 2) + x,)
