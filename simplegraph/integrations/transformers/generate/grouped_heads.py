"""Attention of one query per row by a kernel for that, which copies no keys and values; see `Operators.attend`.

Its mask is that of the cache's tokens, which hides later ones, so that it needs no causal mask.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from simplegraph.fused.torch_operators import Operators
from simplegraph.integrations.transformers.overrides import override_registered

_CHANGES_SUMS = ("softcap", "s_aux", "cache")  # arguments that change the sums or the keys


class _ThreadStep(threading.local):
    operators = Operators()  # of this thread's current step


_STEP = _ThreadStep()


@contextlib.contextmanager
def grouped_heads(operators: Operators) -> Iterator[None]:
    """Make this thread's calls of transformers' `sdpa` attention with one query per row run on these operators.

    Where they have no kernel for a call, transformers' function serves it.
    """
    before, _STEP.operators = _STEP.operators, operators
    try:
        with (
            override_registered(AttentionInterface, "sdpa", sdpa_attention_forward, _attend),
            override_registered(AttentionMaskInterface, "sdpa", sdpa_mask, _mask),
        ):
            yield
    finally:
        _STEP.operators = before


def _mask(*args: Any, **given: Any) -> Any:
    """Mask as `sdpa` does; in a step the cache's mask is the causal one, too. Threads outside a step get their own."""
    mask: Any = given.get("attention_mask")
    is_causal_step = (
        _STEP.operators is not _ThreadStep.operators
        and given.get("q_length") == 1
        and given.get("mask_function") is causal_mask_function
        and mask is not None
        and mask.dtype is torch.bool
        and mask.shape == (given.get("batch_size"), given.get("kv_length"))
        and isinstance(given.get("q_offset"), Tensor)  # a length on the device, as the step's cache has
    )
    return mask[:, None, None] if is_causal_step else sdpa_mask(*args, **given)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attend as `sdpa` does; threads outside a step call transformers' function."""
    operators, bias = _STEP.operators, kwargs.get("position_bias")
    taken = not args and not kwargs.get("dropout") and _can_group(module, query, key, attention_mask, kwargs)
    if taken and operators.attends(query, key, value, bias):
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return operators.attend(query, key, value, attention_mask, bias, scale), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)


def _can_group(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """True for one query per row, heads grouped as the module declares, and no autocast.

    There may be a boolean mask for all heads, and a bias of one row or all, and of one head or all.
    """
    rows, heads, length, _ = query.shape
    bias, keys = kwargs.get("position_bias"), key.shape[2]
    return (
        length == 1
        and key.shape[:2] == (rows, heads // getattr(module, "num_key_value_groups", 1))
        and all(kwargs.get(name) is None for name in _CHANGES_SUMS)
        and (mask is None or (mask.dtype is torch.bool and mask.shape == (rows, 1, 1, keys)))
        and (bias is None or (bias.dim() == 4 and bias.shape[2:] == (1, keys)))
        and (bias is None or (bias.shape[0] in (1, rows) and bias.shape[1] in (1, heads)))
        and not torch.is_autocast_enabled(query.device.type)
    )
