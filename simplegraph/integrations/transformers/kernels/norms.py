"""RMS norms as one kernel, Triton's or torch's own, for those that are written as seven operators or more.

A model writes its norm as a module of its own, and most are copies of a few texts. A norm is known by its forward
being, instruction for instruction, a text below: whatever else it is called or does stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.integrations.transformers.kernels.texts import instructions
from simplegraph.integrations.transformers.overrides import other_forwards

Normalize = Callable[[Tensor, Tensor, float, float], Tensor]


class Norm(NamedTuple):
    """What a text does beside its dividing by the root of the mean of squares.

    Attributes:
        eps: the attribute that is added to the mean; offset: what is added to the weights.
    """

    eps: str = "variance_epsilon"
    offset: float = 0.0


def _as_llama(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _as_olmo(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _as_t5(self: Any, hidden_states: Any) -> Any:
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states


def _as_gemma(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _part_of_gemma(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rms_norms(model: nn.Module) -> dict[nn.Module, Norm]:
    """The norms below a model that one kernel can stand in for."""
    modules = list(model.modules())
    known = {kind: _known(kind) for kind in set(map(type, modules))}
    # One with a part of its own is no copy of the text.
    copies = (module for module in modules if "_norm" not in vars(module))
    return {module: norm for module in copies if (norm := known[type(module)]) is not None}


def fused(norms: Mapping[nn.Module, Norm], *, triton: bool = False) -> AbstractContextManager[None]:
    """In here these norms, when this thread calls them, are one kernel each: Triton's, where that runs.

    It rounds once, where the text in half precision may round twice: results differ by a unit in the last place.
    """
    normalize = _by_triton if triton else _by_torch
    return other_forwards(
        {module: functools.partial(_forward, normalize, module, norm) for module, norm in norms.items()}
    )


def _forward(normalize: Normalize, module: Any, norm: Norm, *args: Any, **kwargs: Any) -> Tensor:
    weight = module.weight
    if kwargs or len(args) != 1 or not _fits(args[0], weight):
        original: Tensor = type(module).forward(module, *args, **kwargs)
        return original
    return normalize(args[0], weight, getattr(module, norm.eps), norm.offset)


def _by_torch(hidden_states: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    if not offset:
        return nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)
    # Half precision has no room for an offset and a small weight.
    exact = nn.functional.rms_norm(hidden_states.float(), weight.shape, weight.float() + offset, eps)
    return exact.type_as(hidden_states)


def _by_triton(hidden_states: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from simplegraph.integrations.transformers.kernels.norm_kernel import MAX_COLUMNS, rms_norm

    if len(weight) > MAX_COLUMNS or torch.is_grad_enabled():
        return _by_torch(hidden_states, weight, eps, offset)
    return rms_norm(hidden_states, weight, eps, offset)


def _fits(hidden_states: Tensor, weight: Tensor) -> bool:
    """Whether one kernel gives what the text gives.

    Autocast, or a weight of another dtype, would change the dtype; the text computes in float32 even in float64. A
    tensor of another class, such as a DTensor, may have the operators of the text only.
    """
    if type(hidden_states) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False
    dtype = hidden_states.dtype
    alike = dtype is weight.dtype and dtype is not torch.float64 and hidden_states.shape[-1:] == weight.shape
    return alike and not torch.is_autocast_enabled(hidden_states.device.type)


def _known(kind: Any) -> Norm | None:
    """What the norms of a class do; None for whatever else it is."""
    forward, part = kind.forward, getattr(kind, "_norm", None)
    functions = [forward] if part is None else [forward, part]
    for function in functions:
        if not isinstance(function, FunctionType) or function.__globals__.get("torch") is not torch:
            return None
    return _KNOWN.get(tuple(map(instructions, functions)))


_KNOWN = {
    tuple(map(instructions, text)): norm
    for text, norm in (
        ((_as_llama,), Norm()),
        ((_as_olmo,), Norm()),
        ((_as_t5,), Norm()),
        ((_as_gemma, _part_of_gemma), Norm("eps", 1.0)),
    )
}
