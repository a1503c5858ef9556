"""Linear layers, which a step of one token in one row runs with a single row."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import Forward, Layer
from simplegraph.fused.operators import KernelTrial, Operators

LINEAR = "linear"


def linear_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map torch's linear layers of a model, and none of a subclass, to their layers."""
    return {module: _layer(module) for module in model.modules() if type(module) is nn.Linear}


def _layer(module: nn.Linear) -> Layer:
    trial = KernelTrial(LINEAR, (module.in_features, int(module.bias is not None)))
    return Layer(LINEAR, (trial,), functools.partial(_linear, module))


def _linear(module: nn.Linear, operators: Operators, original: Forward) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        weight = module.weight
        # A tensor of a subclass, such as a quantized weight, multiplies in its own way.
        plain = type(x) is Tensor and type(weight) in (Tensor, nn.Parameter)
        if not plain or x.numel() != weight.shape[-1] or torch.is_autocast_enabled(x.device.type):
            return original(*args, **kwargs)
        return operators.linear(x, weight, module.bias)

    return forward
