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
from transformers.modeling_utils import AttentionInterface

_NAME = "sdpa"
_NOT_OURS = ("position_bias", "softcap", "s_aux", "cache")  # what changes the sums, or the keys


class _Masks:
    """A step's masks as numbers; their booleans are kept, so that no other mask gets the id of one."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def additive(self, mask: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
        """(rows * heads, 1, 1, length) of `dtype`, to be added to scores, from (rows or 1, 1, 1, length) booleans."""
        key = id(mask), dtype, heads
        if key not in self._known:
            rows, _, _, length = mask.shape
            numbers = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))
            self._known[key] = mask, numbers.expand(rows, heads, 1, length).reshape(rows * heads, 1, 1, length)
        return self._known[key][1]


class _Local(threading.local):
    masks: _Masks | None = None  # of the step that this thread is in


_LOCAL = _Local()
_LOCK = threading.Lock()
_inside = 0  # steps of all threads


@contextlib.contextmanager
def grouped_heads() -> Iterator[None]:
    """In here this thread's calls of transformers' `sdpa` attention with one query a row copy no keys and values."""
    _install()
    before, _LOCAL.masks = _LOCAL.masks, _Masks()
    try:
        yield
    finally:
        _LOCAL.masks = before
        _uninstall()


def _install() -> None:
    global _inside
    with _LOCK:
        _inside += 1
        if AttentionInterface()[_NAME] is sdpa_attention_forward:  # else it is somebody's own
            AttentionInterface.register(_NAME, _attention)


def _uninstall() -> None:
    global _inside
    with _LOCK:
        _inside -= 1
        if not _inside and AttentionInterface()[_NAME] is _attention:
            AttentionInterface.register(_NAME, sdpa_attention_forward)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    """What `sdpa` is registered as meanwhile; other threads get what transformers has there."""
    masks = _LOCAL.masks
    if masks is None or args or not _is_plain(module, query, key, attention_mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    rows, heads, _, elements = query.shape
    shared = key.shape[1]
    if shared == heads:
        mask = None if attention_mask is None else masks.additive(attention_mask, query.dtype, 1)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    # Heads become rows of the batch, and the queries of a group its sequence: so the output needs no copy, either.
    output = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows * shared, 1, heads // shared, elements),
        key.flatten(0, 1).unsqueeze(1),
        value.flatten(0, 1).unsqueeze(1),
        attn_mask=None if attention_mask is None else masks.additive(attention_mask, query.dtype, shared),
        dropout_p=kwargs.get("dropout", 0.0),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None


def _is_plain(module: Any, query: Tensor, key: Tensor, mask: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it is one query a row, heads in groups as the module says, and a mask of booleans for all heads alike."""
    rows, heads, length, _ = query.shape
    return (
        length == 1
        and key.shape[:2] == (rows, heads // getattr(module, "num_key_value_groups", 1))
        and all(kwargs.get(name) is None for name in _NOT_OURS)
        and (mask is None or (mask.dtype is torch.bool and mask.shape == (rows, 1, 1, key.shape[2])))
    )
