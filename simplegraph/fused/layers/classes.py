"""Recognizes layers of other libraries by their class: by its full name, so that no library is imported."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import Layer
from simplegraph.fused.layers.written import hooked, runs_as_written


def class_name(value: Any) -> str:
    """Return the name of an object's class with that of the file where it is written."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def of_classes(model: nn.Module, known: Mapping[str, Callable[[Any], Layer | None]]) -> dict[nn.Module, Layer]:
    """Map modules of a model to the layers that are made for their class; a subclass is another class."""
    layers: dict[nn.Module, Layer] = {}
    for module in model.modules():
        make = known.get(class_name(module))
        if make is not None and runs_as_written(module):
            # Another version of the library may have other parts.
            with contextlib.suppress(AttributeError):
                layer = make(module)
                layers |= {} if layer is None else {module: layer}
    return layers


class Bypassed:
    """Modules of a layer that are not called, though their weights are used, or whose output is written to.

    Args:
        layer: the layer.
        *names: of the modules in it; dots lead to modules of modules.
    """

    __slots__ = ("_layer", "_modules")

    def __init__(self, layer: nn.Module, *names: str) -> None:
        self._layer = layer
        self._modules = [(get := operator.attrgetter(name), get(layer)) for name in names]

    def are_plain(self) -> bool:
        """True if none was replaced or hooked since."""
        modules = [module for _, module in self._modules]
        return all(get(self._layer) is module for get, module in self._modules) and not hooked(*modules)


def is_plain(value: Any, dims: int) -> bool:
    """True for a tensor of so many dimensions, of torch's own class, outside of autocast."""
    plain = type(value) is Tensor and not value.is_nested and value.dim() == dims
    return plain and not torch.is_autocast_enabled(value.device.type)


def is_pointwise(convolution: Any) -> bool:
    """True for a 2-d convolution that is a linear layer of each pixel."""
    sizes = {*convolution.kernel_size, *convolution.stride, convolution.groups}
    return sizes == {1} and convolution.padding == (0, 0)


def is_depthwise(convolution: Any) -> bool:
    """True for a 2-d convolution of each channel by itself, by square windows, strides and zeros around the image."""
    channels = {convolution.in_channels, convolution.out_channels, convolution.groups}
    if len(channels) != 1 or convolution.padding_mode != "zeros" or isinstance(convolution.padding, str):
        return False
    squares = (convolution.kernel_size, convolution.stride, convolution.padding, convolution.dilation)
    return all(len({*each}) == 1 for each in squares) and convolution.dilation[0] == 1
