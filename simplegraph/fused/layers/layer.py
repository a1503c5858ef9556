"""Describe a recognized layer, and tell whether modules run their library's code: their class's forward and methods.

They do if they have no hooks and no method was replaced. Classes go by full name, which needs no import of a library.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.provable import plain_class
from simplegraph.fused.torch_operators import KernelTrial

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Methods that forwards of known classes call, and that fused ones do not.
_CONTINUOUS = ("_operate_on_continuous_inputs", "_get_output_for_continuous_inputs")
_INNER = ("_conv_forward", "_forward_impl", "_scale", "gelu", *_CONTINUOUS)
_NONE = (None,) * len(_INNER)


class AsWritten(Exception):
    """Raised before anything runs, by a layer that does not take a call: the call then runs the library's own code."""


class Layer(NamedTuple):
    """A recognized layer.

    Attributes:
        kind: name by which it is reported and left out.
        trials: of the kernels that its forward runs.
        run: runs a call of it, from operators and the call's arguments, or raises `AsWritten`.
        dims: it takes calls of one plain tensor of so many dimensions, and no others; None if `run` sees to that.
        bypassed: names of modules in it that are not called, though their weights are used, or whose output is written
            to; dots lead to modules of modules. It takes no call once one of them was replaced or hooked.
        settings: attributes of the module that the layer was proven with, and their values; with others it takes none.
    """

    kind: str
    trials: tuple[KernelTrial, ...]
    run: Callable[..., Any]
    dims: int | None = None
    bypassed: tuple[str, ...] = ()
    settings: Mapping[str, Any] = MappingProxyType({})


def arguments_of(signature: inspect.Signature, module: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of a module's forward by name, defaults included."""
    bound = signature.bind(module, *args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def class_name(value: Any) -> str:
    """Return the name of an object's class with that of the file where it is written."""
    kind = plain_class(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def methods(module: Any) -> tuple[Any, ...]:
    """List the methods of its class that a forward of the module runs, and those set on this module instead."""
    kind, attributes = plain_class(module), vars(module)
    inner = (*(getattr(kind, name, None) for name in _INNER), *map(attributes.get, _INNER))
    # Other classes have such names for numbers.
    return kind.forward, *(method if callable(method) else None for method in inner)


def runs_as_written(module: Any) -> bool:
    """True if a module has the methods of its class's library: none was replaced, in the class or for this module."""
    code = methods(module)
    return code[-len(_INNER) :] == _NONE and _are_written(plain_class(module), *code[: -len(_INNER)])


@functools.lru_cache(1024)
def _are_written(kind: type, *methods: Any) -> bool:
    return all(is_written(kind, method) for method in methods if method is not None)


def is_written(kind: type, method: Any) -> bool:
    """True if a method was written in the library of the class that has it; copied names do not count."""
    owner = next((owner for owner in kind.__mro__ if any(own is method for own in vars(owner).values())), None)
    file = getattr(method, "__globals__", {}).get("__name__", "")
    return owner is not None and file.partition(".")[0] == owner.__module__.partition(".")[0]


def runs_own_forward(module: nn.Module) -> bool:
    """True if a module's forward is that of its class, as it is written where the class is."""
    kind = plain_class(module)
    own = "forward" not in vars(module) and kind.forward.__module__ == kind.__module__
    return own and runs_as_written(module)


def hooked(*modules: Any) -> bool:
    """True if a call of one of the modules runs more than its class's forward from the library; None is no module."""
    return any(map(_is_hooked, modules))


def _is_hooked(module: Any) -> bool:
    if module is None:
        return False
    attributes = vars(module)
    return "forward" in attributes or any(attributes[name] for name in _HOOKS) or not runs_as_written(module)


def is_sequential(module: nn.Module) -> bool:
    """True if calls of the module run its children one after another, and nothing else."""
    kind = plain_class(module)
    return (
        isinstance(module, nn.Sequential)
        and "forward" not in vars(module)
        and kind.forward is nn.Sequential.forward
        and runs_as_written(module)
        and kind.__iter__ is nn.Sequential.__iter__
    )


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
    return all(len({*square}) == 1 for square in squares) and convolution.dilation[0] == 1
