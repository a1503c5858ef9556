"""The known layers with residuals: their texts, and how each runs with sums that compute the norm after them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.fused.layers.texts import KnownTexts

AddFor = Callable[[Tensor, Tensor, Any], Tensor]  # residual, branch, the sum's norm: None for the following layer's


class ResidualText(NamedTuple):
    """A known layer.

    Attributes:
        run: computes the layer by an `AddFor`, from the module, its input and its other arguments by name;
            NotImplemented if it does not know these arguments.
        first: name of the norm that reads the layer's input; "" if none does.
        norms: names of the norms of the layer's own sums.
    """

    run: Callable[[Any, Any, dict[str, Any], AddFor], Any]
    first: str
    norms: tuple[str, ...]


def _llama(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    use_cache: Any = False,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


def _mixtral(
    self: Any,
    hidden_states: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        **kwargs,
    )
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


def _run_llama(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)
    hidden = add(hidden, attended, self.post_attention_layernorm)
    return add(hidden, self.mlp(self.post_attention_layernorm(hidden)), None)


def _gemma(
    self: Any,
    hidden_states: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states,
        position_embeddings=position_embeddings,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        **kwargs,
    )
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.pre_feedforward_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.post_feedforward_layernorm(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


def _run_gemma(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)
    hidden = add(hidden, self.post_attention_layernorm(attended), self.pre_feedforward_layernorm)
    forwarded = self.mlp(self.pre_feedforward_layernorm(hidden))
    return add(hidden, self.post_feedforward_layernorm(forwarded), None)


def _clip(self: Any, hidden_states: Any, attention_mask: Any, **kwargs: Any) -> Any:
    residual = hidden_states
    hidden_states = self.layer_norm1(hidden_states)
    hidden_states, _ = self.self_attn(hidden_states=hidden_states, attention_mask=attention_mask, **kwargs)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.layer_norm2(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states


def _run_clip(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    attended, _ = self.self_attn(hidden_states=self.layer_norm1(hidden), **given)
    hidden = add(hidden, attended, self.layer_norm2)
    return add(hidden, self.mlp(self.layer_norm2(hidden)), None)


def _vit(self: Any, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
    residual = hidden_states
    hidden_states = self.layernorm_before(hidden_states)
    hidden_states, _ = self.attention(hidden_states, attention_mask, **kwargs)
    hidden_states = self.dropout(hidden_states)
    hidden_states = hidden_states + residual
    residual = hidden_states
    hidden_states = self.layernorm_after(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.dropout(hidden_states)
    hidden_states = hidden_states + residual
    return hidden_states


def _run_vit(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    mask = given.pop("attention_mask")
    attended, _ = self.attention(self.layernorm_before(hidden), mask, **given)
    hidden = add(hidden, self.dropout(attended), self.layernorm_after)
    return add(hidden, self.dropout(self.mlp(self.layernorm_after(hidden))), None)


def _bert(self: Any, hidden_states: Any, input_tensor: Any) -> Any:
    hidden_states = self.dense(hidden_states)
    hidden_states = self.dropout(hidden_states)
    hidden_states = self.LayerNorm(hidden_states + input_tensor)
    return hidden_states


def _run_bert(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    return self.LayerNorm(add(given["input_tensor"], self.dropout(self.dense(hidden)), self.LayerNorm))


def _whisper(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    past_key_values: Any = None,
    use_cache: Any = True,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.self_attn_layer_norm(hidden_states)
    hidden_states, _ = self.self_attn(
        hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
    )
    hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
    hidden_states = residual + hidden_states
    if encoder_hidden_states is not None:
        residual = hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states, _ = self.encoder_attn(
            hidden_states,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.final_layer_norm(hidden_states)
    hidden_states = self.activation_fn(self.fc1(hidden_states))
    hidden_states = nn.functional.dropout(hidden_states, p=self.activation_dropout, training=self.training)
    hidden_states = self.fc2(hidden_states)
    hidden_states = nn.functional.dropout(hidden_states, p=self.dropout, training=self.training)
    hidden_states = residual + hidden_states
    return hidden_states


def _run_whisper(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    encoded, encoded_mask = given.pop("encoder_hidden_states"), given.pop("encoder_attention_mask")
    mask = given.pop("attention_mask")
    del given["use_cache"]

    def drop(states: Any, chance: float) -> Any:
        return nn.functional.dropout(states, p=chance, training=self.training)

    attended, _ = self.self_attn(self.self_attn_layer_norm(hidden), attention_mask=mask, **given)
    crossed = encoded is not None
    norm = self.encoder_attn_layer_norm if crossed else self.final_layer_norm
    hidden = add(hidden, drop(attended, self.dropout), norm)
    if crossed:
        attended, _ = self.encoder_attn(norm(hidden), key_value_states=encoded, attention_mask=encoded_mask, **given)
        hidden = add(hidden, drop(attended, self.dropout), self.final_layer_norm)
    inner = drop(self.activation_fn(self.fc1(self.final_layer_norm(hidden))), self.activation_dropout)
    return add(hidden, drop(self.fc2(inner), self.dropout), None)


def _t5_forward(self: Any, hidden_states: Any) -> Any:
    forwarded_states = self.layer_norm(hidden_states)
    forwarded_states = self.DenseReluDense(forwarded_states)
    hidden_states = hidden_states + self.dropout(forwarded_states)
    return hidden_states


def _run_t5_forward(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    return add(hidden, self.dropout(self.DenseReluDense(self.layer_norm(hidden))), None)


def _t5_attention(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    position_bias: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    normed_hidden_states = self.layer_norm(hidden_states)
    attention_output, position_bias, attn_weights = self.SelfAttention(
        normed_hidden_states,
        mask=attention_mask,
        position_bias=position_bias,
        past_key_values=past_key_values,
        **kwargs,
    )
    attention_output = hidden_states + self.dropout(attention_output)
    return (attention_output, position_bias, attn_weights)


def _t5_cross(
    self: Any,
    hidden_states: Any,
    key_value_states: Any,
    attention_mask: Any = None,
    position_bias: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    normed_hidden_states = self.layer_norm(hidden_states)
    attention_output, position_bias, attn_weights = self.EncDecAttention(
        normed_hidden_states,
        mask=attention_mask,
        key_value_states=key_value_states,
        position_bias=position_bias,
        past_key_values=past_key_values,
        **kwargs,
    )
    layer_output = hidden_states + self.dropout(attention_output)
    return (layer_output, position_bias, attn_weights)


def _run_t5(name: str, self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    mask = given.pop("attention_mask")
    attended, *rest = getattr(self, name)(self.layer_norm(hidden), mask=mask, **given)
    return add(hidden, self.dropout(attended), None), *rest


def _gpt2(
    self: Any,
    hidden_states: Any,
    past_key_values: Any = None,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    use_cache: Any = False,
    **kwargs: Any,
) -> Any:
    residual = hidden_states
    hidden_states = self.ln_1(hidden_states)
    attn_output, _ = self.attn(
        hidden_states,
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        use_cache=use_cache,
        **kwargs,
    )
    hidden_states = attn_output + residual

    if encoder_hidden_states is not None:
        if not hasattr(self, "crossattention"):
            raise ValueError(
                f"If `encoder_hidden_states` are passed, {self} has to be instantiated with "
                "cross-attention layers by setting `config.add_cross_attention=True`"
            )
        residual = hidden_states
        hidden_states = self.ln_cross_attn(hidden_states)
        cross_attn_output, _ = self.crossattention(
            hidden_states,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )
        hidden_states = residual + cross_attn_output

    residual = hidden_states
    hidden_states = self.ln_2(hidden_states)
    feed_forward_hidden_states = self.mlp(hidden_states)
    hidden_states = residual + feed_forward_hidden_states
    return hidden_states


def _run_gpt2(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    encoded = given.pop("encoder_hidden_states"), given.pop("encoder_attention_mask")
    if encoded[0] is not None:
        return NotImplemented
    attended, _ = self.attn(self.ln_1(hidden), **given)
    hidden = add(hidden, attended, self.ln_2)
    return add(hidden, self.mlp(self.ln_2(hidden)), None)


def _timm(self: Any, x: Any, attn_mask: Any = None, is_causal: Any = False) -> Any:
    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
    x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
    return x


def _run_timm(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    hidden = add(hidden, self.drop_path1(self.ls1(self.attn(self.norm1(hidden), **given))), self.norm2)
    return add(hidden, self.drop_path2(self.ls2(self.mlp(self.norm2(hidden)))), None)


def _torchvision(self: Any, input: Any) -> Any:
    torch._assert(input.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {input.shape}")  # type: ignore[no-untyped-call]
    x = self.ln_1(input)
    x, _ = self.self_attention(x, x, x, need_weights=False)
    x = self.dropout(x)
    x = x + input

    y = self.ln_2(x)
    y = self.mlp(y)
    return x + y


def _run_torchvision(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    if hidden.dim() != 3:
        return NotImplemented
    normed = self.ln_1(hidden)
    attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
    hidden = add(hidden, self.dropout(attended), self.ln_2)
    return add(hidden, self.mlp(self.ln_2(hidden)), None)


RESIDUAL_TEXTS = KnownTexts(
    [
        (_llama, ResidualText(_run_llama, "input_layernorm", ("post_attention_layernorm",))),
        (_mixtral, ResidualText(_run_llama, "input_layernorm", ("post_attention_layernorm",))),
        (_gemma, ResidualText(_run_gemma, "input_layernorm", ("pre_feedforward_layernorm",))),
        (_clip, ResidualText(_run_clip, "layer_norm1", ("layer_norm2",))),
        (_vit, ResidualText(_run_vit, "layernorm_before", ("layernorm_after",))),
        (_bert, ResidualText(_run_bert, "", ("LayerNorm",))),
        (_whisper, ResidualText(_run_whisper, "self_attn_layer_norm", ("encoder_attn_layer_norm", "final_layer_norm"))),
        (_t5_forward, ResidualText(_run_t5_forward, "layer_norm", ())),
        (_t5_attention, ResidualText(functools.partial(_run_t5, "SelfAttention"), "layer_norm", ())),
        (_t5_cross, ResidualText(functools.partial(_run_t5, "EncDecAttention"), "layer_norm", ())),
        (_gpt2, ResidualText(_run_gpt2, "ln_1", ("ln_2",))),
        (_timm, ResidualText(_run_timm, "norm1", ("norm2",))),
        (_torchvision, ResidualText(_run_torchvision, "ln_1", ("ln_2",))),
    ]
)
