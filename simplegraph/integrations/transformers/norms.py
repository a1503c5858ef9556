"""RMS norms as one kernel, Triton's or torch's own, for those that are written as seven operators.

A model writes its norm as a module of its own, and most are copies of one text. A norm is known by its forward being,
instruction for instruction, a text below: whatever else it is called or does stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.integrations.transformers.forwards import instructions, other_forwards

Normalize = Callable[[Tensor, Tensor, float], Tensor]


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


def rms_norms(model: nn.Module) -> list[nn.Module]:
    """The norms below a model that one kernel can stand in for."""
    modules = list(model.modules())
    known = {kind for kind in set(map(type, modules)) if _is_rms_norm(kind)}
    return [module for module in modules if type(module) in known]


def fused(norms: list[nn.Module], *, triton: bool = False) -> AbstractContextManager[None]:
    """In here these norms, when this thread calls them, are one kernel each: Triton's, where that runs.

    It rounds once, where the text in half precision may round twice: results differ by a unit in the last place.
    """
    normalize = _by_triton if triton else _by_torch
    return other_forwards({norm: functools.partial(_forward, normalize, norm) for norm in norms})


def _forward(normalize: Normalize, norm: Any, hidden_states: Tensor) -> Tensor:
    weight = norm.weight
    if not _fits(hidden_states, weight):
        original: Tensor = type(norm).forward(norm, hidden_states)
        return original
    return normalize(hidden_states, weight, norm.variance_epsilon)


def _by_torch(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, eps)


def _by_triton(hidden_states: Tensor, weight: Tensor, eps: float) -> Tensor:
    from simplegraph.integrations.transformers.norm_kernel import MAX_COLUMNS, rms_norm

    plain = type(hidden_states) is Tensor and type(weight) in (Tensor, nn.Parameter)
    if not plain or len(weight) > MAX_COLUMNS or torch.is_grad_enabled():
        return _by_torch(hidden_states, weight, eps)
    return rms_norm(hidden_states, weight, eps)


def _fits(hidden_states: Tensor, weight: Tensor) -> bool:
    """Whether one kernel gives what the text gives.

    Autocast, or a weight of another dtype, would change the dtype; the text computes in float32 even in float64.
    """
    dtype = hidden_states.dtype
    alike = dtype is weight.dtype and dtype is not torch.float64 and hidden_states.shape[-1:] == weight.shape
    return alike and not torch.is_autocast_enabled(hidden_states.device.type)


def _is_rms_norm(kind: Any) -> bool:
    forward = kind.forward
    if not isinstance(forward, FunctionType) or forward.__globals__.get("torch") is not torch:
        return False
    return instructions(forward) in _KNOWN


_KNOWN = frozenset(map(instructions, (_as_llama, _as_olmo)))
