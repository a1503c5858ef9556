"""Attention of one query per row, without copies of keys and values for heads that share them.

For grouped heads transformers (5.17; later releases less often) copies keys and values for every head, in every layer
and step, and SDPA converts a boolean mask to numbers in every layer. With a single query, the heads of a group can
instead be treated as rows of one longer query, which gives the same sums, and the mask is converted once per step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from simplegraph.integrations.transformers.overrides import override_attention

_CHANGES_SUMS = ("position_bias", "softcap", "s_aux", "cache")  # arguments that change the sums or the keys
# A step's masks as numbers, by the id of the boolean mask, which is kept alive so that its id is not reused.
_NumericMasks = dict[tuple[int, torch.dtype, int], tuple[Tensor, Tensor]]


class _ThreadStep(threading.local):
    masks: _NumericMasks | None = None  # of this thread's current step; None outside a step


_STEP = _ThreadStep()


@contextlib.contextmanager
def grouped_heads() -> Iterator[None]:
    """Make this thread's calls of transformers' `sdpa` attention with one query per row copy no keys and values."""
    before, _STEP.masks = _STEP.masks, {}
    try:
        with override_attention("sdpa", sdpa_attention_forward, _attend):
            yield
    finally:
        _STEP.masks = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attend as `sdpa` does; threads outside a step call transformers' function."""
    known = _STEP.masks
    if known is None or args or not _can_group(module, query, key, attention_mask, kwargs):
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


def _can_group(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """True for one query per row, heads grouped as the module declares, and one boolean mask for all heads."""
    rows, heads, length, _ = query.shape
    return (
        length == 1
        and key.shape[:2] == (rows, heads // getattr(module, "num_key_value_groups", 1))
        and all(kwargs.get(name) is None for name in _CHANGES_SUMS)
        and (mask is None or (mask.dtype is torch.bool and mask.shape == (rows, 1, 1, key.shape[2])))
    )
