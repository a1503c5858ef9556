"""The known layers with residuals, and how each runs with sums that compute the norm after them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

AddFor = Callable[[Tensor, Tensor, Any], Tensor]  # residual, branch, the sum's norm: None for the following layer's


class KnownResidual(NamedTuple):
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


def _run_llama(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)
    hidden = add(hidden, attended, self.post_attention_layernorm)
    return add(hidden, self.mlp(self.post_attention_layernorm(hidden)), None)


def _run_gemma(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden), **given)
    hidden = add(hidden, self.post_attention_layernorm(attended), self.pre_feedforward_layernorm)
    forwarded = self.mlp(self.pre_feedforward_layernorm(hidden))
    return add(hidden, self.post_feedforward_layernorm(forwarded), None)


def _run_clip(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    attended, _ = self.self_attn(hidden_states=self.layer_norm1(hidden), **given)
    hidden = add(hidden, attended, self.layer_norm2)
    return add(hidden, self.mlp(self.layer_norm2(hidden)), None)


def _run_vit(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    mask = given.pop("attention_mask")
    attended, _ = self.attention(self.layernorm_before(hidden), mask, **given)
    hidden = add(hidden, self.dropout(attended), self.layernorm_after)
    return add(hidden, self.dropout(self.mlp(self.layernorm_after(hidden))), None)


def _run_bert(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    return self.LayerNorm(add(given["input_tensor"], self.dropout(self.dense(hidden)), self.LayerNorm))


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


def _run_t5_forward(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    return add(hidden, self.dropout(self.DenseReluDense(self.layer_norm(hidden))), None)


def _run_t5(name: str, self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    mask = given.pop("attention_mask")
    attended, *rest = getattr(self, name)(self.layer_norm(hidden), mask=mask, **given)
    return add(hidden, self.dropout(attended), None), *rest


def _run_gpt2(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    encoded = given.pop("encoder_hidden_states"), given.pop("encoder_attention_mask")
    if encoded[0] is not None:
        return NotImplemented
    attended, _ = self.attn(self.ln_1(hidden), **given)
    hidden = add(hidden, attended, self.ln_2)
    return add(hidden, self.mlp(self.ln_2(hidden)), None)


def _run_timm(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    hidden = add(hidden, self.drop_path1(self.ls1(self.attn(self.norm1(hidden), **given))), self.norm2)
    return add(hidden, self.drop_path2(self.ls2(self.mlp(self.norm2(hidden)))), None)


def _run_torchvision(self: Any, hidden: Any, given: dict[str, Any], add: AddFor) -> Any:
    if hidden.dim() != 3:
        return NotImplemented
    normed = self.ln_1(hidden)
    attended, _ = self.self_attention(normed, normed, normed, need_weights=False)
    hidden = add(hidden, self.dropout(attended), self.ln_2)
    return add(hidden, self.mlp(self.ln_2(hidden)), None)


KNOWN_RESIDUALS = {
    "LlamaDecoderLayer.forward": KnownResidual(_run_llama, "input_layernorm", ("post_attention_layernorm",)),
    "MixtralDecoderLayer.forward": KnownResidual(_run_llama, "input_layernorm", ("post_attention_layernorm",)),
    "Gemma2DecoderLayer.forward": KnownResidual(_run_gemma, "input_layernorm", ("pre_feedforward_layernorm",)),
    "CLIPEncoderLayer.forward": KnownResidual(_run_clip, "layer_norm1", ("layer_norm2",)),
    "ViTLayer.forward": KnownResidual(_run_vit, "layernorm_before", ("layernorm_after",)),
    "BertSelfOutput.forward": KnownResidual(_run_bert, "", ("LayerNorm",)),
    "WhisperDecoderLayer.forward": KnownResidual(
        _run_whisper, "self_attn_layer_norm", ("encoder_attn_layer_norm", "final_layer_norm")
    ),
    "T5LayerFF.forward": KnownResidual(_run_t5_forward, "layer_norm", ()),
    "T5LayerSelfAttention.forward": KnownResidual(functools.partial(_run_t5, "SelfAttention"), "layer_norm", ()),
    "T5LayerCrossAttention.forward": KnownResidual(functools.partial(_run_t5, "EncDecAttention"), "layer_norm", ()),
    "GPT2Block.forward": KnownResidual(_run_gpt2, "ln_1", ("ln_2",)),
    "Block.forward": KnownResidual(_run_timm, "norm1", ("norm2",)),
    "EncoderBlock.forward": KnownResidual(_run_torchvision, "ln_1", ("ln_2",)),
}
