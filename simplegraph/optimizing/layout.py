"""Stores the weights of 2-d convolutions in channels_last, so that their kernels need not transpose images."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

_MARK = "_simplegraph_was_contiguous"


def store_channels_last(root: nn.Module, folded: Collection[nn.Module]) -> list[str]:
    """Store weights in channels_last, in place.

    A convolution whose weight is so converts its input, and its output is so: images are converted once, on their way
    into the first convolution.

    Args:
        root: the module.
        folded: layers that have such weights already.

    Returns:
        The names of the convolutions whose weights were changed.
    """
    names = []
    for name, module in root.named_modules():
        if type(module) is nn.Conv2d and module not in folded and _can_be_stored(module.weight):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
            vars(module)[_MARK] = True
            names.append(name)
    return names


def _can_be_stored(weight: torch.Tensor) -> bool:
    """True for plain contiguous weights that share no memory: whoever shares it would keep the old."""
    return (
        type(weight) is nn.Parameter
        and weight.layout is torch.strided
        and not weight.is_meta
        and weight.is_floating_point()
        and weight.is_contiguous()
        and not weight.is_contiguous(memory_format=torch.channels_last)
        and weight.untyped_storage().nbytes() == weight.nbytes
    )


def restore_contiguous(root: nn.Module) -> None:
    """Store weights as they were before `store_channels_last`."""
    for module in root.modules():
        weight = getattr(module, "weight", None)
        if vars(module).pop(_MARK, False) and isinstance(weight, nn.Parameter) and not weight.is_contiguous():
            weight.data = weight.data.contiguous()
