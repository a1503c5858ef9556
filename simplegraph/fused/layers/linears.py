"""Linear layers, which a step of one token in one row runs with a single row; those of one input run together."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.classes import hooked
from simplegraph.fused.layers.gates import gated_projections
from simplegraph.fused.layers.layer import AsWritten, Layer
from simplegraph.fused.layers.rotary import rotary_layers
from simplegraph.fused.torch_operators import KernelTrial, Operators

LINEAR = "linear"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# Computes linear layers of one input from their weights and biases; as `Operators.linears`.
ComputeLinears = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor]]


def linear_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map torch's linear layers of a model, and none of a subclass, to their layers."""
    found: dict[nn.Module, Together] = {
        module: Together([module]) for module in model.modules() if type(module) is nn.Linear
    }
    of_one_input: list[tuple[list[Any], bool]] = [
        ([getattr(each, name, None) for name in _PROJECTIONS], type(each).__module__.startswith("transformers."))
        for each in rotary_layers(model)
    ]
    for layers, known in (*of_one_input, *((some, True) for some in gated_projections(model))):
        alike = all(layer in found for layer in layers) and not hooked(*layers)
        if alike and len({(each.in_features, each.bias is None) for each in layers}) == 1:
            found |= dict.fromkeys(layers, Together(layers, known=known))
    return {module: _layer(module, together) for module, together in found.items()}


class Together(threading.local):
    """Linear layers that a model calls with one input, one after the other: the call of the first computes all.

    Args:
        layers: of equally many inputs, in the order of their calls.
        known: True if the code that calls them is known to write nothing to their input meanwhile. Of inference
            tensors, which count no writes, those of other code are computed one by one.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, known: bool = True) -> None:
        self.layers, self._known = layers, known
        self._x: Tensor | None = None
        self._version: int | None = None
        self._found: dict[nn.Linear, Tensor] = {}

    def compute(self, layer: nn.Linear, x: Tensor, compute: ComputeLinears) -> Tensor:
        """Return what a layer makes of an input."""
        version = None if x.is_inference() else x._version
        if layer is self.layers[0] and (self._known or version is not None):
            self._x, self._version = x, version
            self._found = dict(zip(self.layers, compute(x, *_weights(self.layers)), strict=True))
        elif x is not self._x or version != self._version or layer not in self._found:
            return compute(x, *_weights([layer]))[0]
        result = self._found.pop(layer)
        self._x = self._x if self._found else None
        return result

    def are_plain(self) -> bool:
        """True if no weight is of a subclass, such as a quantized one, which multiplies in its own way."""
        return all(type(each.weight) in (Tensor, nn.Parameter) for each in self.layers)


def _weights(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    return [each.weight for each in layers], [each.bias for each in layers]


def _layer(module: Any, together: Together) -> Layer:
    sizes = module.in_features, len(together.layers), int(module.bias is not None)
    return Layer(LINEAR, (KernelTrial("linears", sizes),), functools.partial(_linear, module, together))


def _linear(module: Any, together: Together, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    x: Any = args[0] if len(args) == 1 and not kwargs else None
    one_row = type(x) is Tensor and x.numel() == module.in_features == x.shape[-1]
    if not one_row or not together.are_plain() or torch.is_autocast_enabled(x.device.type):
        raise AsWritten
    return together.compute(module, x, operators.linears)
