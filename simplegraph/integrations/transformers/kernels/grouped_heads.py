"""Attention of one query per row, by a kernel for that, or by torch's without copies of keys and values.

The kernel is Triton's; see `Operators.attend`. Where it does not run: for grouped heads transformers (5.17; later
releases less often) copies keys and values for every head, in every layer and step, and SDPA converts a boolean mask to
numbers in every layer. With a single query, the heads of a group can instead be treated as rows of one longer query,
which gives the same sums, and the mask is converted once per step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from simplegraph.fused.torch_operators import Operators
from simplegraph.integrations.transformers.overrides import override_attention

_CHANGES_SUMS = ("softcap", "s_aux", "cache")  # arguments that change the sums or the keys
# A step's masks as numbers, by the id of the boolean mask, which is kept alive so that its id is not reused.
_NumericMasks = dict[tuple[int, torch.dtype, int], tuple[Tensor, Tensor]]


class _ThreadStep(threading.local):
    masks: _NumericMasks | None = None  # of this thread's current step; None outside a step
    operators = Operators()


_STEP = _ThreadStep()


@contextlib.contextmanager
def grouped_heads(operators: Operators | None = None) -> Iterator[None]:
    """Make this thread's calls of transformers' `sdpa` attention with one query per row copy no keys and values.

    Args:
        operators: attend where they have a kernel for that; torch does by default.
    """
    before = _STEP.masks, _STEP.operators
    _STEP.masks, _STEP.operators = {}, operators or Operators()
    try:
        with override_attention("sdpa", sdpa_attention_forward, _attend):
            yield
    finally:
        _STEP.masks, _STEP.operators = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attend as `sdpa` does; threads outside a step call transformers' function."""
    known, bias = _STEP.masks, kwargs.get("position_bias")
    taken = known is not None and not args and _can_group(module, query, key, attention_mask, kwargs)
    if taken and _is_plain(query, key, bias) and not kwargs.get("dropout"):
        scale, operators = kwargs.get("scaling"), _STEP.operators
        if operators.attends(query, key, value, bias):
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            return operators.attend(query, key, value, attention_mask, bias, scale), None
    if known is None or not taken or bias is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    rows, heads, _, elements = query.shape
    shared = key.shape[1]
    mask = attention_mask
    if mask is not None:
        mask = _additive(known, mask, query.dtype, 1 if shared == heads else shared)
    if shared == heads:
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    # Key heads become rows of the batch, and the query heads of a group its sequence, so the output needs no copy.
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows * shared, 1, heads // shared, elements),
        key.flatten(0, 1).unsqueeze(1),
        value.flatten(0, 1).unsqueeze(1),
        attn_mask=mask,
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def _additive(known: _NumericMasks, mask: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
    """Convert a boolean mask (rows or 1, 1, 1, length) to (rows * heads, 1, 1, length) numbers to add to scores."""
    key = id(mask), dtype, heads
    if key not in known:
        rows, _, _, length = mask.shape
        numbers = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
        known[key] = mask, numbers.expand(rows, heads, 1, length).reshape(rows * heads, 1, 1, length)
    return known[key][1]


def _is_plain(query: Tensor, key: Tensor, bias: Any) -> bool:
    """True for a bias of one row or all, and of one head or all, outside of autocast."""
    (rows, heads, _, _), keys = query.shape, key.shape[2]
    alike = bias is None or (bias.dim() == 4 and bias.shape[0] in (1, rows) and bias.shape[1] in (1, heads))
    return alike and (bias is None or bias.shape[2:] == (1, keys)) and not torch.is_autocast_enabled(query.device.type)


def _can_group(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """True for one query per row, heads grouped as the module declares, and one boolean mask for all heads."""
    rows, heads, length, _ = query.shape
    return (
        length == 1
        and key.shape[:2] == (rows, heads // getattr(module, "num_key_value_groups", 1))
        and all(kwargs.get(name) is None for name in _CHANGES_SUMS)
        and (mask is None or (mask.dtype is torch.bool and mask.shape == (rows, 1, 1, key.shape[2])))
    )
