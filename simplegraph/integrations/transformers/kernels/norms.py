"""Runs RMS norms that are written as seven or more operators as one kernel, Triton's or torch's own.

Models define their own norm modules, most of them copies of a few sources. A norm is recognized if its forward equals,
instruction for instruction, one of the functions below; any other module is left unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.choice import chosen_operators
from simplegraph.integrations.transformers.kernels.texts import instructions, recognize
from simplegraph.integrations.transformers.overrides import Forward

Normalize = Callable[[Tensor, Tensor, float, float], Tensor]


class Norm(NamedTuple):
    """The parameters of a recognized RMS norm.

    Attributes:
        eps: name of the attribute that is added to the mean of squares; offset: number that is added to the weights.
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
    """List the norms of a model that one kernel can replace."""
    # An instance with its own `_norm` is no copy of the source.
    return {module: norm for module, norm in recognize(model, _norm_of).items() if "_norm" not in vars(module)}


def norm_forwards(model: nn.Module, *, triton: bool = False) -> dict[nn.Module, Forward]:
    """Make forwards of one kernel each for the recognized norms of a model, by Triton if `triton`, else by torch.

    In half precision they round once, where the original may round twice: results differ by a unit in the last place.
    """
    normalize = chosen_operators(triton=triton).rms_norm
    return {module: functools.partial(_run_norm, normalize, module, norm) for module, norm in rms_norms(model).items()}


def _run_norm(normalize: Normalize, module: Any, norm: Norm, *args: Any, **kwargs: Any) -> Tensor:
    weight = module.weight
    if kwargs or len(args) != 1 or not _fits_norm(args[0], weight):
        return type(module).forward(module, *args, **kwargs)  # type: ignore[no-any-return]
    return normalize(args[0], weight, getattr(module, norm.eps), norm.offset)


def _fits_norm(hidden_states: Tensor, weight: Tensor) -> bool:
    """True if one kernel gives the same result as the original operators.

    Autocast, or a weight of another dtype, would change the dtype; the original computes in float32 even for float64.
    A tensor subclass, such as DTensor, may not support the kernel.
    """
    if type(hidden_states) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return False
    dtype = hidden_states.dtype
    alike = dtype is weight.dtype and dtype is not torch.float64 and hidden_states.shape[-1:] == weight.shape
    return alike and not torch.is_autocast_enabled(hidden_states.device.type)


def _norm_of(kind: Any) -> Norm | None:
    """Return the parameters of a class of norms; None if the class is not recognized."""
    part = getattr(kind, "_norm", None)
    functions = (kind.forward,) if part is None else (kind.forward, part)
    if any(getattr(function, "__globals__", {}).get("torch") is not torch for function in functions):
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
