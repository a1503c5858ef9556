"""Rotary embeddings of queries and keys together: one kernel on a GPU, six operators elsewhere, instead of ten.

Models define the embedding as a function in the module of their attention, and most are copies of one source. It is
recognized if it equals the function below, instruction for instruction; any other function is left unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.choice import chosen_operators
from simplegraph.fused.operators import DTYPES
from simplegraph.integrations.transformers.kernels.texts import instructions, recognize, with_names
from simplegraph.integrations.transformers.overrides import Forward

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_NAME, _HALF = "apply_rotary_pos_emb", "rotate_half"


def rotate_half(x: Any) -> Any:  # noqa: D103
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: Any = 1) -> Any:  # noqa: D103
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def rotary_attentions(model: nn.Module) -> list[nn.Module]:
    """List the modules of a model whose forward calls the recognized rotary embedding."""
    return list(recognize(model, _calls_known_text))


def rotary_forwards(model: nn.Module, rotate: Rotate) -> dict[nn.Module, Forward]:
    """Make forwards that embed by `rotate`, exact to the bit, for the modules that `rotary_attentions` lists."""
    attentions = rotary_attentions(model)
    functions: set[Any] = {type(module).forward for module in attentions}
    changed = {function: _with_rotate(function, rotate) for function in functions}
    return {module: functools.partial(changed[type(module).forward], module) for module in attentions}


def rotation(*, triton: bool) -> Rotate:
    """Return the function that embeds queries and keys: the Triton kernel if `triton`, else by torch's operators."""
    return chosen_operators(triton=triton).rotate


def _with_rotate(forward: FunctionType, rotate: Rotate) -> FunctionType:
    original = forward.__globals__[_NAME]

    def embed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or not _fits_rotation(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
        return rotate(q, k, cos, sin)

    return with_names(forward, {_NAME: embed})


def _fits_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """True if whole heads are rotated, in one dtype, without gradients."""
    tensors = (q, k, cos, sin)
    if any(type(tensor) is not Tensor for tensor in tensors) or (q.dim(), k.dim(), cos.dim()) != (4, 4, 3):
        return False
    rows, _, tokens, elements = q.shape
    return (
        (k.shape[0], *k.shape[2:]) == (rows, tokens, elements)
        and cos.shape == sin.shape
        and cos.shape in ((rows, tokens, elements), (1, tokens, elements))
        and elements % 2 == 0
        and q.dtype in DTYPES
        and {(tensor.dtype, tensor.device) for tensor in tensors} == {(q.dtype, q.device)}
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def _calls_known_text(kind: Any) -> bool:
    forward = kind.forward
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return False
    rotary: Any = forward.__globals__.get(_NAME)
    if instructions(rotary) != _ROTARY or rotary.__defaults__ != (1,):
        return False
    half: Any = rotary.__globals__.get(_HALF)
    return instructions(half) == _HALVES and half.__globals__.get("torch") is torch


_ROTARY, _HALVES = instructions(apply_rotary_pos_emb), instructions(rotate_half)
