"""Stores the weights of 2-d convolutions in channels_last, so that their kernels need not transpose images."""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from simplegraph.base.modes import outside_modes

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
    names, tied = [], tied_memories(root)
    for name, module in root.named_modules():
        weight: Any = module.weight if type(module) is nn.Conv2d and module not in folded else None
        if _can_be_stored(weight) and weight.untyped_storage().data_ptr() not in tied:
            with outside_modes():
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            vars(module)[_MARK] = True
            names.append(name)
    return names


def _can_be_stored(weight: Any) -> bool:
    return (
        has_own_memory(weight)
        and weight.is_floating_point()
        and weight.is_contiguous()
        and not weight.is_contiguous(memory_format=torch.channels_last)
    )


def has_own_memory(weight: Any) -> bool:
    """True for a plain parameter alone in its memory, which no process shares: whoever does keeps the old."""
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided or weight.is_meta:
        return False
    shared = weight.device.type == "cpu" and weight.untyped_storage().is_shared()
    return not shared and not weight.is_inference() and weight.untyped_storage().nbytes() == weight.nbytes


def tied_memories(root: nn.Module) -> set[int]:
    """Return the addresses of memory that several parameters or buffers of a module lie in."""
    tensors = (each for each in (*root.parameters(), *root.buffers()) if each.layout is torch.strided)
    places = collections.Counter(_address(each) for each in tensors)
    return {place for place, count in places.items() if count > 1}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in (torch.Tensor, nn.Parameter) else 0


def restore_contiguous(root: nn.Module) -> None:
    """Store weights as they were before `store_channels_last`."""
    for module in root.modules():
        weight = getattr(module, "weight", None)
        if vars(module).pop(_MARK, False) and isinstance(weight, nn.Parameter) and not weight.is_contiguous():
            with outside_modes():
                weight.data = weight.data.contiguous()
