"""Hides the later positions of a fixed cache from attention that takes no mask at steps of one token.

Such attention is right for a cache that ends with the present token, as transformers' own does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Classes whose forward takes an additive `attention_mask` (rows, 1, tokens, positions), but is passed None.
_UNMASKED = ("LEDDecoderAttention",)


def unmasked_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that attend without a mask at steps of one token."""
    return [part for part in model.modules() if type(part).__name__ in _UNMASKED]


def masked_forwards(parts: list[nn.Module], position: Tensor, span: int) -> dict[nn.Module, Callable[..., Any]]:
    """Make forwards for the parts that hide all positions after `position` (1,) of a cache of `span` positions."""
    if not parts:
        return {}
    later = torch.arange(span, device=position.device) > position

    def forward(attend: Callable[..., Any], hidden_states: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is None and kwargs.get("key_value_states") is None:
            shape = (hidden_states.shape[0], 1, hidden_states.shape[1], span)
            hidden = torch.zeros(shape, dtype=hidden_states.dtype, device=hidden_states.device)
            kwargs["attention_mask"] = hidden.masked_fill(later, torch.finfo(hidden.dtype).min)
        return attend(hidden_states=hidden_states, **kwargs)

    return {part: functools.partial(forward, part.forward) for part in parts}
