"""Group norms of images: torch's own copies images in channels_last to another format, and its result with them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import Forward, Layer
from simplegraph.fused.layers.written import runs_as_written
from simplegraph.fused.torch_operators import Grouped, KernelTrial, Operators


def group_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the group norms of a model, of torch's own class, to their layers."""
    norms: list[Any] = [each for each in model.modules() if type(each) is nn.GroupNorm and runs_as_written(each)]
    return {module: Layer("group_norm", _trials(module), functools.partial(_normalize, module)) for module in norms}


def _trials(module: Any) -> tuple[KernelTrial, ...]:
    return (KernelTrial("group_norm", (module.num_channels, module.num_groups)),) if module.affine else ()


def _normalize(module: Any, operators: Operators, original: Forward, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor or torch.is_autocast_enabled(args[0].device.type):
        return original(*args, **kwargs)
    return operators.group_norm(args[0], Grouped(module.num_groups, module.eps, module.weight, module.bias))
