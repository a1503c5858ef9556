"""Rotary embeddings of queries and keys together: one kernel on a GPU, six operators elsewhere, instead of ten.

Models define the embedding as a function in the module of their attention, and most are copies of one source. The
attention's forward is copied with another function under that name. The original keeps its own, and runs instead once
another of its global names was given another value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.layer import AsWritten, Layer
from simplegraph.fused.layers.provable import GlobalNames, provable_code, undecorated, with_names
from simplegraph.fused.layers.recognition import answered, same
from simplegraph.fused.torch_operators import DTYPES, KernelTrial, Operators, sample_numbers

_NAME = "apply_rotary_pos_emb"


def rotary_layers(model: nn.Module) -> dict[nn.Module, Layer]:
    """Map the modules of a model whose forward calls the recognized rotary embedding to their layers."""
    kinds = {kind for kind in set(map(type, model.modules())) if _calls_rotary(kind)}
    return {module: _layer(module) for module in model.modules() if type(module) in kinds}


def _layer(module: Any) -> Layer:
    elements = getattr(module, "head_dim", None)
    trials = (KernelTrial("rotate", (elements,)),) if isinstance(elements, int) and elements % 2 == 0 else ()
    written: Any = undecorated(type(module).forward)
    names = GlobalNames(written, written.__globals__[_NAME])
    return Layer("rotary", trials, functools.partial(_run, module, written, functools.cache(_with_rotate), names))


def _run(
    module: Any,
    forward: Any,
    rotating: Callable[..., Any],
    names: GlobalNames,
    operators: Operators,
    *args: Any,
    **kwargs: Any,
) -> Any:
    renamed = forward is not type(module).forward and "past_key_values" in kwargs  # from before transformers 5.24
    if renamed or not names.are_still():
        raise AsWritten
    return rotating(forward, operators)(module, *args, **kwargs)


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


def _calls_rotary(kind: Any) -> bool:
    """True if a class's forward calls a function that is proven to rotate all elements of heads."""
    forward = undecorated(kind.forward)
    if not isinstance(forward, FunctionType) or _NAME not in forward.__code__.co_names:
        return False
    rotary: Any = forward.__globals__.get(_NAME)
    return answered(
        provable_code(object, rotary, ()), functools.partial(_rotates_alike, rotary), torch.float64, *DTYPES
    )


def _rotates_alike(rotary: Callable[..., Any], dtype: torch.dtype) -> bool:
    q, k, cos, sin = (sample_numbers(dtype, 2, 2, 3, 8, phase=phase) for phase in range(4))
    for rows in (1, 2):
        given = (q, k[:, :1], cos[:rows, 0], sin[:rows, 0])
        if not same(rotary(*given), Operators().rotate(*given)):
            return False
    try:
        rotary(q, k, cos[:, 0, :, :4], sin[:, 0, :, :4])
    except RuntimeError:
        return True
    return False  # it rotates a part of a head, too
