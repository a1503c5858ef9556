"""The kinds of layers that are recognized, by their names in reports and options; finds and fuses layers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from simplegraph.fused.choice import operators_for
from simplegraph.fused.layers.denoisers import ADAPTIVE_NORM, ATTENTION, ATTENTION_CLASSES, TIMESTEPS
from simplegraph.fused.layers.images import IMAGE_BLOCK, IMAGE_CLASSES, group_layers
from simplegraph.fused.layers.layer import AsWritten, Layer, class_name, hooked, is_plain, runs_as_written
from simplegraph.fused.layers.linears import LINEAR, activation_layers, gate_layers, linear_layers
from simplegraph.fused.layers.norms import gated_norms, norm_layer, residual_layers, rms_norms, sum_norms
from simplegraph.fused.layers.rotary import rotary_layers
from simplegraph.fused.torch_operators import KernelTrial, Operators

RMS_NORM, RESIDUAL, GATED, ACTIVATION, ROTARY = "rms_norm", "residual", "gated", "activation", "rotary"
GROUP_NORM, ONE_QUERY = "group_norm", "one_query"
_SHOWN = 4  # names in a line
_CLASSES: Mapping[str, Callable[[Any], Layer | None]] = {**ATTENTION_CLASSES, **IMAGE_CLASSES}
KINDS: Mapping[str, str] = MappingProxyType(
    {
        RMS_NORM: "RMS norm of seven or more operators run as one",
        RESIDUAL: "sum of a branch and the residual computed together with the norm after it",
        GATED: "activation of a gate computed together with its product",
        ACTIVATION: "activation of several operators run as one",
        ROTARY: "rotary embedding of queries and keys run as one",
        ADAPTIVE_NORM: "norm that is scaled and shifted by image computed together with the gated sum before it",
        ATTENTION: "attention on torch's fused one, with nothing around it that does nothing",
        TIMESTEPS: "what depends on the timestep alone computed once for all layers",
    }
)

# For steps of a token per row.
TOKEN_KINDS: Mapping[str, str] = MappingProxyType(
    {
        LINEAR: "linear layer of one row, which leaves no part of the GPU idle",
        ONE_QUERY: "attention of one query per row to a fixed cache",
    }
)

# For images in channels_last, and results that have that format, too.
IMAGE_KINDS: Mapping[str, str] = MappingProxyType(
    {
        GROUP_NORM: "group norm of images in channels_last, without copies",
        IMAGE_BLOCK: "block of convolutions whose norms, activations, biases and sums run as fewer kernels",
    }
)


def find_layers(
    model: nn.Module, skip: Collection[str] = (), *, images: bool = False, tokens: bool = False
) -> dict[nn.Module, Layer]:
    """Map the modules of a model that are recognized to their layers.

    Args:
        model: any module.
        skip: names of kinds to leave out.
        images: True adds `IMAGE_KINDS`.
        tokens: True adds those of `TOKEN_KINDS` that are layers.
    """
    layers: dict[nn.Module, Layer] = {}
    rms = rms_norms(model)
    alone = {} if RMS_NORM in skip else rms
    norms, gated = dict(alone), {} if RMS_NORM in skip else gated_norms(model)
    if RESIDUAL not in skip:
        layers, behind = residual_layers(model, sum_norms(model, rms))
        norms |= behind
    layers |= gated | {module: norm_layer(module, norm, alone=module in alone) for module, norm in norms.items()}
    left_out = {*skip, *(() if images else IMAGE_KINDS)}
    layers |= {module: layer for module, layer in _of_classes(model).items() if layer.kind not in left_out}
    finders: dict[str, Callable[[nn.Module], dict[nn.Module, Layer]]] = {
        GATED: gate_layers,
        ACTIVATION: activation_layers,
        ROTARY: rotary_layers,
        GROUP_NORM: group_layers,
        **({LINEAR: linear_layers} if tokens else {}),
    }
    for kind, find in finders.items():
        if kind not in left_out:
            layers |= find(model)
    return layers


def _of_classes(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map modules of a model to the layers that are made for their class; a subclass is another class."""
    layers: dict[nn.Module, Layer] = {}
    for module in model.modules():
        make = _CLASSES.get(class_name(module))
        if make is not None and runs_as_written(module):
            # Another version of the library may have other parts.
            with contextlib.suppress(AttributeError):
                layer = make(module)
                layers |= {} if layer is None else {module: layer}
    return layers


def operators_of(
    layers: Mapping[nn.Module, Layer], device: torch.device, dtype: torch.dtype, *trials: KernelTrial
) -> Operators:
    """Return the operators for these layers, after the trials of their kernels and of others."""
    return operators_for(device, dtype, [*(trial for layer in layers.values() for trial in layer.trials), *trials])


def fused_forwards(layers: Mapping[nn.Module, Layer], operators: Operators) -> dict[nn.Module, Callable[..., Any]]:
    """Make forwards of fused operators for these layers; calls that operators do not take run the class's forward."""
    return {module: _fused_forward(module, layer, operators) for module, layer in layers.items()}


def _fused_forward(module: Any, layer: Layer, operators: Operators) -> Callable[..., Any]:
    forward, dims, settings = type(module).forward, layer.dims, layer.settings.items()
    bypassed = [(get := operator.attrgetter(name), get(module)) for name in layer.bypassed]

    def run(*args: Any, **kwargs: Any) -> Any:
        taken = dims is None or (len(args) == 1 and not kwargs and is_plain(args[0], dims))
        taken = taken and all(getattr(module, name, None) == value for name, value in settings)
        if taken and all(get(module) is part and not hooked(part) for get, part in bypassed):
            try:
                return layer.run(operators, *args, **kwargs)
            except AsWritten:
                pass  # the error is handled before the forward runs, so that it is not shown as the cause of others
        return forward(module, *args, **kwargs)

    return run


def listed(kind: str, names: Sequence[str]) -> str:
    """Write a kind and the first few names of its layers in one line."""
    return f"{kind} x {len(names)}: {shortened(names)}"


def shortened(names: Sequence[str]) -> str:
    """Join the first few names, and say how many more there are."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def names_by_kind(model: nn.Module, layers: Mapping[nn.Module, Layer]) -> dict[str, list[str]]:
    """List the names of the layers by kind."""
    names: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if module in layers:
            names.setdefault(layers[module].kind, []).append(name or type(module).__name__)
    return {kind: names[kind] for kind in (*KINDS, *TOKEN_KINDS, *IMAGE_KINDS) if kind in names}
