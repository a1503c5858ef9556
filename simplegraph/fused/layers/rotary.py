"""Rotary embeddings of queries and keys together: one kernel on a GPU, six operators elsewhere, instead of ten.

Models define the embedding as a function in the module of their attention, and most are copies of one source. The
attention's forward is copied with another function under that name; the original keeps its own, and runs where somebody
gave another of its global names another value since.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import Forward, Layer
from simplegraph.fused.layers.texts import GlobalNames, known_name, unwrapped, with_names
from simplegraph.fused.torch_operators import DTYPES, KernelTrial, Operators

_NAME = "apply_rotary_pos_emb"


def rotary_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the modules of a model whose forward calls the recognized rotary embedding to their layers."""
    kinds = {kind for kind in set(map(type, model.modules())) if _calls_known_text(kind)}
    return {module: _layer(module) for module in model.modules() if type(module) in kinds}


def _layer(module: Any) -> Layer:
    elements = getattr(module, "head_dim", None)
    trials = (KernelTrial("rotate", (elements,)),) if isinstance(elements, int) and elements % 2 == 0 else ()
    written: Any = unwrapped(type(module).forward)
    names = GlobalNames(written, written.__globals__[_NAME])
    return Layer("rotary", trials, functools.partial(_run, module, functools.cache(_with_rotate), names))


def _run(
    module: Any,
    rotating: Callable[..., Any],
    names: GlobalNames,
    operators: Operators,
    original: Forward,
    *args: Any,
    **kwargs: Any,
) -> Any:
    written = unwrapped(original.func)
    renamed = written is not original.func and "past_key_values" in kwargs  # by the wrapper, as in `residuals._run`
    if renamed or not names.are_still():
        return original(*args, **kwargs)
    return rotating(written, operators)(module, *args, **kwargs)


def _with_rotate(forward: Any, operators: Operators) -> FunctionType:
    original = forward.__globals__[_NAME]

    def embed(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if args or kwargs or not _fits_rotation(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **kwargs)  # type: ignore[no-any-return]
        return operators.rotate(q, k, cos, sin)

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
    forward = unwrapped(kind.forward)
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return False
    rotary: Any = forward.__globals__.get(_NAME)
    return known_name(rotary) == _NAME and rotary.__defaults__ == (1,)
