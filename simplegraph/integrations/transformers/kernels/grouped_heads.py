"""Attention of one query a row, without copies of keys and values for heads that share them.

Where heads share keys and values, transformers (5.17, later ones less) copies these for every head, in every layer and
step, and SDPA makes numbers of a mask of booleans in every layer. For one query the heads of a group can be rows of
it instead, which gives the same sums, and the numbers are made once a step.
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

_CHANGES_SUMS = ("position_bias", "softcap", "s_aux", "cache")  # or the keys
# A step's masks as numbers. Their booleans are kept, so that no other mask gets the id of one.
_NumericMasks = dict[tuple[int, torch.dtype, int], tuple[Tensor, Tensor]]


class _ThreadStep(threading.local):
    masks: _NumericMasks | None = None  # of the step that this thread is in


_STEP = _ThreadStep()


@contextlib.contextmanager
def grouped_heads() -> Iterator[None]:
    """Let this thread's calls of transformers' `sdpa` attention with one query a row copy no keys and values."""
    before, _STEP.masks = _STEP.masks, {}
    try:
        with override_attention("sdpa", sdpa_attention_forward, _attend):
            yield
    finally:
        _STEP.masks = before


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """Attend as `sdpa` does; threads that are in no step get what transformers has there."""
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
    # Heads become rows of the batch, and the queries of a group its sequence: so the output needs no copy, either.
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
    """Make (rows * heads, 1, 1, length) numbers to be added to scores, from (rows or 1, 1, 1, length) booleans."""
    key = id(mask), dtype, heads
    if key not in known:
        rows, _, _, length = mask.shape
        numbers = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
        known[key] = mask, numbers.expand(rows, heads, 1, length).reshape(rows * heads, 1, 1, length)
    return known[key][1]


def _can_group(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """True if it is one query a row, heads in groups as the module says, and a mask of booleans for all heads alike."""
    rows, heads, length, _ = query.shape
    return (
        length == 1
        and key.shape[:2] == (rows, heads // getattr(module, "num_key_value_groups", 1))
        and all(kwargs.get(name) is None for name in _CHANGES_SUMS)
        and (mask is None or (mask.dtype is torch.bool and mask.shape == (rows, 1, 1, key.shape[2])))
    )
