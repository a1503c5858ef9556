"""Attentions on torch's fused one: `nn.MultiheadAttention` of one input, and those of diffusers."""

from __future__ import annotations

import functools
from typing import Any

import torch.nn.functional as F

from simplegraph.fused.layers.classes import class_name, is_plain, is_written
from simplegraph.fused.layers.layer import AsWritten, Layer
from simplegraph.fused.torch_operators import Operators

ATTENTION = "attention"
_PROCESSOR = "diffusers.models.attention_processor.AttnProcessor2_0"


def _multihead_layer(module: Any) -> Layer | None:
    return Layer(ATTENTION, (), functools.partial(_multihead, module)) if _is_simple(module) else None


def _is_simple(module: Any) -> bool:
    known = module.in_proj_weight is not None and module.bias_k is None and module.bias_v is None
    return known and module.batch_first and not module.add_zero_attn


def _multihead(module: Any, operators: Operators, *args: Any, **kwargs: Any) -> Any:
    """Run it on one input without masks, for which torch does not always choose its fused attention."""
    others = (value for name, value in kwargs.items() if name not in ("need_weights", "average_attn_weights"))
    plain = (
        len(args) == 3 and kwargs.get("need_weights") is False and all(each is None or each is False for each in others)
    )
    plain = plain and all(each is args[0] for each in args) and _is_simple(module)
    if not plain or not is_plain(args[0], 3):
        raise AsWritten
    shape = (*args[0].shape[:2], module.num_heads, module.head_dim)
    product = F.linear(args[0], module.in_proj_weight, module.in_proj_bias)
    query, key, value = (part.view(shape).transpose(1, 2) for part in product.chunk(3, dim=-1))
    found = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(args[0].shape)
    return F.linear(found, module.out_proj.weight, module.out_proj.bias), None


def _attention_layer(module: Any) -> Layer | None:
    return Layer(ATTENTION, (), functools.partial(_attention, module)) if _is_known(module) else None


def _is_known(module: Any) -> bool:
    others = (module.spatial_norm, module.group_norm, module.norm_q, module.norm_k, module.norm_cross)
    if any(each is not None for each in others) or module.residual_connection:
        return False
    kind = type(module.processor)
    return class_name(module.processor) == _PROCESSOR and is_written(kind, kind.__call__)


def _attention(
    module: Any,
    operators: Operators,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Run what its processor does, without a division by one."""
    known = _is_known(module) and module.rescale_output_factor == 1
    if kwargs or attention_mask is not None or not known or not is_plain(hidden_states, 3):
        raise AsWritten
    states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    parts = (module.to_q(hidden_states), module.to_k(states), module.to_v(states))
    query, key, value = (
        part.view(*part.shape[:2], module.heads, part.shape[-1] // module.heads).transpose(1, 2) for part in parts
    )
    found = F.scaled_dot_product_attention(query, key, value)
    return module.to_out[1](module.to_out[0](found.transpose(1, 2).reshape(*parts[0].shape)))


ATTENTION_CLASSES = {
    "torch.nn.modules.activation.MultiheadAttention": _multihead_layer,
    "diffusers.models.attention_processor.Attention": _attention_layer,
}
