"""Linear layers: gated ones of a perceptron, ``activation(gate) * up``, and those that run with a single row.

Beside them, activations that are written as several operators. A step of one token in one row runs linear layers with a
single row; those of one input run together.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer, hooked
from simplegraph.fused.layers.rotary import rotary_layers
from simplegraph.fused.layers.texts import known_name, recognize
from simplegraph.fused.torch_operators import ACTIVATIONS, KernelTrial, Operators

LINEAR = "linear"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_PRODUCT = "_simplegraph_product"  # among a gate's attributes: its activation's kind, the factor, and their product
_NOTHING = (None, None, None)
# Computes linear layers of one input from their weights, their biases and a kind; as `Operators.linears`.
ComputeLinears = Callable[..., Sequence[Tensor]]


class Gate(NamedTuple):
    """The names of a gated layer's parts; `up` is "" if one projection gives both halves."""

    gate: str
    up: str
    activation: str
    down: str


_GATES = {
    "LlamaMLP.forward": Gate("gate_proj", "up_proj", "act_fn", "down_proj"),
    "Phi3MLP.forward": Gate("gate_up_proj", "", "activation_fn", "down_proj"),
}
_AS_OPERATORS = {"NewGELUActivation.forward": "gelu_tanh"}
_ACTIVATIONS = {"SiLUActivation.forward": "silu", **_AS_OPERATORS}


def activation_kind(module: Any) -> str:
    """Return the name in `ACTIVATIONS` of an activation module; "" if it is unknown or hooked."""
    if hooked(module):
        return ""
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate, "")
    name = known_name(type(module).forward)
    if name != "GELUActivation.forward":
        return _ACTIVATIONS.get(name, "")
    function = module.act
    if function is nn.functional.gelu:
        return "gelu"
    tanh = isinstance(function, functools.partial) and function.func is nn.functional.gelu and not function.args
    return "gelu_tanh" if tanh and function.keywords == {"approximate": "tanh"} else ""


def gate_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the gated layers of a model to their layers."""
    return {
        module: Layer("gated", _trials(module, gate, kind), functools.partial(_gated, module, gate))
        for module, gate in recognize(model, _GATES).items()
        if (kind := activation_kind(getattr(module, gate.activation)))
    }


def _trials(module: Any, gate: Gate, kind: str) -> tuple[KernelTrial, ...]:
    columns = getattr(getattr(module, gate.down), "in_features", None)
    return () if columns is None else (KernelTrial("gated", (columns, kind)),)


def _gated(module: Any, gate: Gate, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    kind = activation_kind(getattr(module, gate.activation))
    if not kind or kwargs or len(args) != 1:
        raise AsWritten
    states = getattr(module, gate.gate)(args[0])
    states, up = (states, getattr(module, gate.up)(args[0])) if gate.up else states.chunk(2, dim=-1)
    plain = type(states) is Tensor and type(up) is Tensor
    known, factor, product = vars(states).pop(_PRODUCT, _NOTHING) if plain else _NOTHING
    if factor is not up or known != kind:
        product = operators.gated(states, up, kind) if plain else ACTIVATIONS[kind](states) * up
    return getattr(module, gate.down)(product)


def activation_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map activations that are written as eight operators, and that torch has as one, to their layers."""
    return {
        module: Layer("activation", (), functools.partial(_activation, kind))
        for module, kind in recognize(model, _AS_OPERATORS).items()
    }


def _activation(kind: str, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
        raise AsWritten
    return ACTIVATIONS[kind](args[0])


def linear_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map torch's linear layers of a model, and none of a subclass, to their layers."""
    found: dict[nn.Module, Together] = {
        module: Together([module]) for module in model.modules() if type(module) is nn.Linear
    }
    of_one_input: list[tuple[list[Any], bool, str]] = [
        *(
            (
                [getattr(each, name, None) for name in _PROJECTIONS],
                type(each).__module__.startswith("transformers."),
                "",
            )
            for each in rotary_layers(model)
        ),
        *(
            ([getattr(each, gate.gate), getattr(each, gate.up)], True, activation_kind(getattr(each, gate.activation)))
            for each, gate in recognize(model, _GATES).items()
            if gate.up
        ),
    ]
    for layers, known, kind in of_one_input:
        alike = all(layer in found for layer in layers) and not hooked(*layers)
        if alike and len({(each.in_features, each.bias is None) for each in layers}) == 1:
            found |= dict.fromkeys(layers, Together(layers, known=known, kind=kind))
    return {module: _layer(module, together) for module, together in found.items()}


class Together(threading.local):
    """Linear layers that a model calls with one input, one after the other: the call of the first computes all.

    Args:
        layers: of equally many inputs, in the order of their calls.
        known: True if the code that calls them is known to write nothing to their input meanwhile. Of inference
            tensors, which count no writes, those of other code are computed one by one.
        kind: of the activation if the two are a gate and what it multiplies: their product is computed, too.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, known: bool = True, kind: str = "") -> None:
        self.layers, self._known, self.kind = layers, known, kind
        self._x: Tensor | None = None
        self._version: int | None = None
        self._found: dict[nn.Linear, Tensor] = {}

    def compute(self, layer: nn.Linear, x: Tensor, compute: ComputeLinears) -> Tensor:
        """Return what a layer makes of an input."""
        version = None if x.is_inference() else x._version
        if layer is self.layers[0] and (self._known or version is not None):
            self._x, self._version = x, version
            found = compute(x, *_weights(self.layers), *filter(None, [self.kind]))
            self._found = dict(zip(self.layers, found, strict=False))
            if self.kind:
                vars(found[0])[_PRODUCT] = self.kind, *found[1:]
        elif x is not self._x or version != self._version or layer not in self._found:
            return compute(x, *_weights([layer]))[0]
        result = self._found.pop(layer)
        self._x = self._x if self._found else None
        return result


def _weights(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    return [each.weight for each in layers], [each.bias for each in layers]


def _layer(module: Any, together: Together) -> Layer:
    sizes = module.in_features, int(module.bias is not None), *filter(None, [together.kind])
    return Layer(LINEAR, (KernelTrial("linears", sizes),), functools.partial(_linear, module, together))


def _linear(module: Any, together: Together, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    x: Any = args[0] if len(args) == 1 and not kwargs else None
    one_row = type(x) is Tensor and x.numel() == module.in_features == x.shape[-1]
    # A subclass, such as a quantized weight, multiplies in its own way.
    plain = all(type(each.weight) in (Tensor, nn.Parameter) for each in together.layers)
    if not one_row or not plain or torch.is_autocast_enabled(x.device.type):
        raise AsWritten
    return together.compute(module, x, operators.linears)
