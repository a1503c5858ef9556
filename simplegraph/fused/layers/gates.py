"""Gated layers of a perceptron, ``activation(gate) * up``, and activations that are written as several operators."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor, nn

from simplegraph.fused.layers.classes import hooked
from simplegraph.fused.layers.layer import AsWritten, Layer
from simplegraph.fused.layers.texts import known_name, recognize
from simplegraph.fused.torch_operators import ACTIVATIONS, KernelTrial, Operators


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
    found = {}
    for module, gate in recognize(model, _GATES).items():
        kind = activation_kind(getattr(module, gate.activation))
        if kind:
            found[module] = Layer("gated", _trials(module, gate, kind), functools.partial(_gated, module, gate))
    return found


def gated_projections(model: nn.Module) -> list[list[Any]]:
    """List the projections of each gated layer of a model that has two: to the gate, and to what it multiplies."""
    known = recognize(model, _GATES).items()
    return [[getattr(module, gate.gate), getattr(module, gate.up)] for module, gate in known if gate.up]


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
    product = operators.gated(states, up, kind) if plain else ACTIVATIONS[kind](states) * up
    return getattr(module, gate.down)(product)


def activation_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map activations that are written as eight operators, and that torch has as one, to their layers."""
    known = recognize(model, _AS_OPERATORS)
    return {module: Layer("activation", (), functools.partial(_activation, kind)) for module, kind in known.items()}


def _activation(kind: str, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
        raise AsWritten
    return ACTIVATIONS[kind](args[0])
