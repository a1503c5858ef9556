"""Linear layers: gated ones of a perceptron, ``activation(gate) * up``, and those of a single row.

Also activations that are written as several operators. A step of one token in one row runs its linear layers on a
single row; layers of one input run together.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer, hooked
from simplegraph.fused.layers.recognition import SMOOTH, Calls, Candidate, Candidates, same
from simplegraph.fused.layers.rotary import rotary_layers
from simplegraph.fused.torch_operators import ACTIVATIONS, DTYPES, KernelTrial, Operators, sample_numbers

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
    gate: {*filter(None, gate)}
    for gate in (
        Gate("gate_proj", "up_proj", "act_fn", "down_proj"),
        Gate("gate_up_proj", "", "activation_fn", "down_proj"),
    )
}
# Names that an activation of the user's own may read.
_ACTIVATION_WORDS = frozenset(
    ("erf", "functional", "gelu", "math", "mul", "nn", "pi", "pow", "sigmoid", "silu", "sqrt", "tanh")
)


class Activation(NamedTuple):
    """An activation that a module is known, or proven, to compute.

    Attributes:
        module: the module.
        kind: a name in `ACTIVATIONS`.
        settings: the attributes that the module reads, with the values of its proof.
        several: True if it runs several operators.
    """

    module: nn.Module
    kind: str
    settings: Mapping[str, Any]
    several: bool = False

    def is_still(self, module: Any) -> bool:
        """True if a module is this one, without hooks and with the same settings."""
        same = all(getattr(module, name, None) == value for name, value in self.settings.items())
        return module is self.module and not hooked(module) and same


def activation_of(module: Any, candidates: Candidates) -> Activation | None:
    """Recognize an activation module; None if its function is not known, or if it has hooks."""
    if not isinstance(module, nn.Module) or module._modules or module._parameters or module._buffers or hooked(module):
        return None
    if type(module) is nn.SiLU:
        return Activation(module, "silu", {"inplace": False}) if not module.inplace else None
    if type(module) is nn.GELU:
        kind = {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
        return None if kind is None else Activation(module, kind, {"approximate": module.approximate})
    candidate = candidates.of(module, _ACTIVATION_WORDS)
    for kind in ACTIVATIONS:
        agrees = functools.partial(_activates_alike, kind)
        if candidate is not None and candidate.proves(kind, agrees, torch.float64, *DTYPES):
            several = not candidate.proves("one operator", _runs_one_operator, torch.float32)
            return Activation(module, kind, candidate.settings, several)
    return None


def _activates_alike(kind: str, candidate: Candidate, dtype: torch.dtype) -> bool:
    x = torch.linspace(-12, 12, 481, dtype=torch.float64).to(dtype).view(1, 13, 37)
    before = x.clone()
    return candidate.runs_to(ACTIVATIONS[kind](before), x) and torch.equal(x, before)


def _runs_one_operator(candidate: Candidate, dtype: torch.dtype) -> bool:
    return len(candidate.run(torch.ones(2, dtype=dtype))[1]) == 1


def gate_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the gated layers of a model to their layers."""
    layers: dict[nn.Module, Layer] = {}
    for module, (gate, activation, settings) in _proven_gates(model).items():
        run = functools.partial(_gated, module, gate, activation)
        layers[module] = Layer("gated", _trials(module, gate, activation.kind), run, settings=settings)
    return layers


def _proven_gates(model: nn.Module) -> dict[Any, tuple[Gate, Activation, Mapping[str, Any]]]:
    """Map the gated layers of a model to their parts' names, their activation, and the settings that they read."""
    gates: dict[Any, tuple[Gate, Activation, Mapping[str, Any]]] = {}
    candidates = Candidates()
    for module in model.modules():
        gate = next((gate for gate, names in _GATES.items() if names <= module._modules.keys()), None)
        activation = None if gate is None else activation_of(module._modules[gate.activation], candidates)
        if gate is not None and activation is not None:
            candidate = candidates.of(module, {*gate, "chunk"})
            agrees = functools.partial(_gates_alike, gate, activation.kind)
            if candidate is not None and candidate.proves((gate, activation.kind), agrees, torch.float64, *DTYPES):
                gates[module] = gate, activation, candidate.settings
    return gates


def _gates_alike(gate: Gate, kind: str, candidate: Candidate, dtype: torch.dtype) -> bool:
    """True if a module calls its parts as a gated layer does, and multiplies their results."""
    x, states = sample_numbers(dtype, 2, 3, 4), sample_numbers(dtype, 2, 3, 16)
    calls, expected_calls = (Calls(_GATES[gate] - {gate.activation}, 8 * states, {}) for _ in range(2))
    result, operators = candidate.run(x, parts={**calls.parts, gate.activation: ACTIVATIONS[kind]})
    parts = expected_calls.parts
    first = parts[gate.gate](x)
    first, second = (first, parts[gate.up](x)) if gate.up else first.chunk(2, dim=-1)
    expected = parts[gate.down](ACTIVATIONS[kind](first) * second)
    return same(result, expected) and calls.same(expected_calls) and SMOOTH.issuperset(operators)


def _trials(module: Any, gate: Gate, kind: str) -> tuple[KernelTrial, ...]:
    columns = getattr(getattr(module, gate.down), "in_features", None)
    return () if columns is None else (KernelTrial("gated", (columns, kind)),)


def _gated(module: Any, gate: Gate, activation: Activation, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    kind = activation.kind
    if kwargs or len(args) != 1 or not activation.is_still(getattr(module, gate.activation)):
        raise AsWritten
    states = getattr(module, gate.gate)(args[0])
    states, up = (states, getattr(module, gate.up)(args[0])) if gate.up else states.chunk(2, dim=-1)
    plain = type(states) is Tensor and type(up) is Tensor
    kept, factor, product = vars(states).pop(_PRODUCT, _NOTHING) if plain else _NOTHING
    if factor is not up or kept != kind:
        product = operators.gated(states, up, kind) if plain else ACTIVATIONS[kind](states) * up
    return getattr(module, gate.down)(product)


def activation_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map activations that are written as several operators, and that torch has as one, to their layers."""
    candidates = Candidates()
    layers: dict[nn.Module, Layer] = {}
    for module in model.modules():
        activation = activation_of(module, candidates)
        if activation is not None and activation.several:
            run = functools.partial(_activation, activation.kind)
            layers[activation.module] = Layer("activation", (), run, settings=activation.settings)
    return layers


def _activation(kind: str, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
        raise AsWritten
    return ACTIVATIONS[kind](args[0])


def linear_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map torch's linear layers of a model, and none of a subclass, to their layers."""
    together_of: dict[nn.Module, Together] = {
        module: Together([module]) for module in model.modules() if type(module) is nn.Linear
    }
    of_one_input: list[tuple[list[Any], bool, str]] = [
        *(
            (
                [getattr(attention, name, None) for name in _PROJECTIONS],
                type(attention).__module__.startswith("transformers."),
                "",
            )
            for attention in rotary_layers(model)
        ),
        *(
            ([getattr(module, gate.gate), getattr(module, gate.up)], True, activation.kind)
            for module, (gate, activation, _) in _proven_gates(model).items()
            if gate.up
        ),
    ]
    for layers, input_unchanged, kind in of_one_input:
        alike = all(layer in together_of for layer in layers) and not hooked(*layers)
        if alike and len({(layer.in_features, layer.bias is None) for layer in layers}) == 1:
            together_of |= dict.fromkeys(layers, Together(layers, input_unchanged=input_unchanged, kind=kind))
    return {module: _layer(module, together) for module, together in together_of.items()}


class Together(threading.local):
    """Linear layers that a model calls with one input, one after the other: the call of the first computes all.

    Args:
        layers: of equally many inputs, in the order of their calls.
        input_unchanged: True if the code that calls them is known to write nothing to their input meanwhile. In other
            code, layers of an inference tensor, which counts no writes, are computed one by one.
        kind: of the activation if the layers are a gate and the layer that it multiplies: the product is computed, too.
    """

    def __init__(self, layers: Sequence[nn.Linear], *, input_unchanged: bool = True, kind: str = "") -> None:
        self.layers, self._input_unchanged, self.kind = layers, input_unchanged, kind
        self._x: Tensor | None = None
        self._version: int | None = None
        self._results: dict[nn.Linear, Tensor] = {}

    def compute(self, layer: nn.Linear, x: Tensor, compute: ComputeLinears) -> Tensor:
        """Return a layer's output for an input."""
        version = None if x.is_inference() else x._version
        if layer is self.layers[0] and (self._input_unchanged or version is not None):
            self._x, self._version = x, version
            results = compute(x, *_weights(self.layers), *filter(None, [self.kind]))
            self._results = dict(zip(self.layers, results, strict=False))
            if self.kind:
                vars(results[0])[_PRODUCT] = self.kind, *results[1:]
        elif x is not self._x or version != self._version or layer not in self._results:
            return compute(x, *_weights([layer]))[0]
        result = self._results.pop(layer)
        self._x = self._x if self._results else None
        return result


def _weights(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers]


def _layer(module: Any, together: Together) -> Layer:
    sizes = module.in_features, int(module.bias is not None), *filter(None, [together.kind])
    return Layer(LINEAR, (KernelTrial("linears", sizes),), functools.partial(_linear, module, together))


def _linear(module: Any, together: Together, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    x: Any = args[0] if len(args) == 1 and not kwargs else None
    one_row = type(x) is Tensor and x.numel() == module.in_features == x.shape[-1]
    # A subclass, such as a quantized weight, multiplies in its own way.
    plain = all(type(layer.weight) in (Tensor, nn.Parameter) for layer in together.layers)
    if not one_row or not plain or torch.is_autocast_enabled(x.device.type):
        raise AsWritten
    return together.compute(module, x, operators.linears)
