"""Runs blocks of convolutions so that bias, sum and activation after a convolution are one kernel.

A block is known by its class, or is an `nn.Sequential`. Only folded layers run like this; others are called as they
are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.images import DEPTH, FINISHING
from simplegraph.fused.layers.layer import (
    AsWritten,
    Layer,
    class_name,
    hooked,
    is_depthwise,
    is_pointwise,
    is_sequential,
    runs_own_forward,
)
from simplegraph.fused.layers.provable import plain_class
from simplegraph.fused.optimizing.folded import uses_of
from simplegraph.fused.optimizing.pairs import EPILOGUE
from simplegraph.fused.torch_operators import PRODUCT_FINISHES, KernelTrial, Operators


def block_layer(block: nn.Module) -> Layer:
    """Return the layer that runs a block like this."""
    run: Callable[..., Any] = _sequence if is_sequential(block) else _BLOCKS[class_name(block)][0]
    return Layer(EPILOGUE, (), functools.partial(run, block), 4)


def _folds(block: nn.Module, *names: str) -> list[Any]:
    """Return the folds of a block's convolutions. Raises AsWritten if one is not folded."""
    uses = uses_of(block)
    folds = [uses.get(id(block._modules.get(name))) for name in names]
    if any(fold is None or not _is_convolution(fold) for fold in folds):
        raise AsWritten
    return folds


def _convolve(operators: Operators, fold: Any, x: Tensor, kind: str, residual: Tensor | None = None) -> Tensor:
    """Run a folded convolution, and the sum and activation that follow it."""
    layer, weights = fold.layer, fold.weights
    if residual is None and is_pointwise(layer) and kind in PRODUCT_FINISHES:
        return operators.pointwise(x, weights.weight, weights.bias, kind)
    if residual is None and is_depthwise(layer):
        return operators.depthwise(x, weights.weight, weights.bias, layer.stride[0], layer.padding[0], kind)
    out = layer._conv_forward(x, layer.weight, None)
    # One channel, a 1x1 window or a weight that was set since may leave it in another format.
    out = out.contiguous(memory_format=torch.channels_last)
    return operators.finish(out, weights.shift, residual, kind, weights.factor)


def _sequence(block: nn.Module, operators: Operators, x: Any) -> Any:
    uses, modules, at = uses_of(block), list(block._modules.values()), 0
    while at < len(modules):
        module, norm, after = (*modules[at : at + 3], None, None)[:3]
        fold = uses.get(id(module))
        folded = fold is not None and fold is uses.get(id(norm)) and _is_convolution(fold)
        if folded and type(x) is Tensor and x.dim() == 4:
            kind = activation(after)
            x = _convolve(operators, fold, x, kind)
            at += 3 if kind else 2
        else:
            x = module(x)  # type: ignore[misc]
            at += 1
    return x


def keeps_weight(fold: Any, block: nn.Module) -> bool:
    """True if a block always runs a folded layer on its own weight; a call that it refuses runs layer and norm."""
    ordinary = _is_convolution(fold) and not is_pointwise(fold.layer) and not is_depthwise(fold.layer)
    return ordinary and (fold.layer, fold.norm) in itertools.pairwise(block._modules.values())


def _is_convolution(fold: Any) -> bool:
    return plain_class(fold.layer) is nn.Conv2d


def activation(module: nn.Module | None) -> str:
    """Return the name of an activation that a kernel computes; "" if it is another module, or a hooked one."""
    return "" if hooked(module) else FINISHING.get(type(module), "")


def _relu(block: Any) -> str:
    if activation(block.relu) != "relu":
        raise AsWritten
    return "relu"


def _residual(block: Any, operators: Operators, x: Tensor) -> Tensor:
    *inner, last = _folds(block, *_BLOCKS[class_name(block)][2])
    relu, out = _relu(block), x
    for fold in inner:
        out = _convolve(operators, fold, out, relu)
    return _convolve(operators, last, out, relu, x if block.downsample is None else block.downsample(x))


def _resnet(block: Any, operators: Operators, x: Tensor) -> Tensor:
    (first,), relu = _folds(block, "conv1"), _relu(block)
    x = block.maxpool(_convolve(operators, first, x, relu))
    for stage in (block.layer1, block.layer2, block.layer3, block.layer4):
        x = stage(x)
    scores: Tensor = block.fc(torch.flatten(block.avgpool(x), 1))
    return scores


def _inverted(block: Any, operators: Operators, x: Tensor) -> Tensor:
    *inner, last = block.block
    fits = (
        class_name(block.stochastic_depth) == DEPTH
        and not block.stochastic_depth.training
        and is_sequential(block.block)
        and is_sequential(last)
        and len(last) == 2
        and not hooked(block.block, last, block.stochastic_depth)
    )
    if not fits:
        raise AsWritten
    (fold,) = _folds(last, "0")
    out = x
    for module in inner:
        out = module(out)
    return _convolve(operators, fold, out, "", x if block.use_res_connect else None)


# For each known block: the function that runs it, the activation of its sum, and its own convolutions.
_BLOCKS: Mapping[str, tuple[Callable[[Any, Operators, Tensor], Tensor], str | None, Collection[str]]] = {
    "torchvision.models.resnet.BasicBlock": (_residual, "relu", ("conv1", "conv2")),
    "torchvision.models.resnet.Bottleneck": (_residual, "relu", ("conv1", "conv2", "conv3")),
    "torchvision.models.resnet.ResNet": (_resnet, None, ("conv1",)),
    "torchvision.models.efficientnet.MBConv": (_inverted, "", ()),
}


def find_blocks(root: nn.Module, owners: Mapping[nn.Module, Collection[Any]]) -> list[nn.Module]:
    """List the modules that can run like this: owners of folded convolutions, and blocks whose last part is one.

    Args:
        root: the whole module.
        owners: the folds of each owner.
    """
    candidates = [module for module in root.modules() if class_name(module) in _BLOCKS and runs_own_forward(module)]
    blocks = [module for module in candidates if _is_complete(module, [fold.layer for fold in owners.get(module, ())])]
    return [module for module in owners if is_sequential(module)] + blocks if owners else []


def _is_complete(block: Any, folded: Collection[nn.Module]) -> bool:
    """True if a block has the parts that its class makes; another block would refuse every call."""
    names = _BLOCKS[class_name(block)][2]
    complete = all(block._modules.get(name) in folded for name in names)
    return complete and (not names or activation(block._modules.get("relu")) == "relu")


def block_trials(root: nn.Module, blocks: Collection[nn.Module]) -> list[KernelTrial]:
    """List the trials of the kernels that these blocks run after convolutions."""
    if not blocks:
        return []
    kinds = dict.fromkeys(["", *(kind for module in root.modules() if (kind := FINISHING.get(type(module))))])
    forms = (_BLOCKS.get(class_name(block), (None, None)) for block in blocks)
    sums = dict.fromkeys(kind for _, kind, *_ in forms if kind is not None)
    trials = [KernelTrial("finish", (kind, added, 1)) for added, some in enumerate((kinds, sums)) for kind in some]
    convolutions = (module for module in root.modules() if isinstance(module, nn.Conv2d))
    windows = dict.fromkeys(module.kernel_size[0] for module in convolutions if is_depthwise(module))
    trials += [KernelTrial("depthwise", (size,)) for size in windows]
    return [*trials, *(KernelTrial("pointwise", (kind,)) for kind in kinds if kind in PRODUCT_FINISHES)]
