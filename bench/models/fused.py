"""The Llama's layers with FlashInfer's fused operators: residual + RMSNorm, rotary positions, SiLU-and-mul.

The same weights, caches and attention; a third of the kernels. What a compiler does to the plain
operators by itself, an engine without one does by calling these. The compiled arms take the plain layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bench.models.llama import Decoder, DecoderLayer, Llama, Step


class FusedLayers:
    """Runs a decoder's layers.

    Args:
        decoder: on a GPU, with heads of 64, 128 or 256 elements.
        flashinfer: the module; its kernels are compiled at their first use, and cached on disk.
    """

    def __init__(self, decoder: Decoder, flashinfer: ModuleType) -> None:
        self._decoder = decoder
        self._ops = flashinfer
        self._rows = torch.arange(len(decoder.query_start_loc) - 1, device=decoder.query_start_loc.device)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """From embeddings, (T, hidden_size), to final hidden states."""
        decoder, ops = self._decoder, self._ops
        table = _rotary_table(step)
        residual = hidden
        hidden = ops.rmsnorm(hidden, decoder.layers[0].input_layernorm.weight, decoder.norm.eps)
        for layer, norm in zip(decoder.layers, self._norms_after(), strict=True):
            hidden = self._attend(layer, hidden, step, table)
            ops.fused_add_rmsnorm(hidden, residual, layer.post_attention_layernorm.weight, decoder.norm.eps)
            hidden = layer.mlp.down_proj(ops.silu_and_mul(layer.mlp.gate_up_proj(hidden)))
            ops.fused_add_rmsnorm(hidden, residual, norm.weight, decoder.norm.eps)
        return hidden

    def _norms_after(self) -> list[torch.nn.RMSNorm]:
        """The norm that comes after each layer: the next layer's first, and the last of all."""
        return [*(layer.input_layernorm for layer in list(self._decoder.layers)[1:]), self._decoder.norm]

    def _attend(self, layer: DecoderLayer, hidden: Tensor, step: Step, table: Tensor) -> Tensor:
        attention, tokens = layer.self_attn, hidden.shape[0]
        rows = (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
        qkv = attention.qkv_proj(hidden)
        q, k, v = qkv.split([heads * attention.head_dim for heads in rows], dim=-1)
        self._ops.rope.apply_rope_with_cos_sin_cache_inplace(
            self._rows[:tokens], q, k, attention.head_dim, table, is_neox=True
        )
        out = hidden.new_empty(tokens, attention.num_heads, attention.head_dim)
        parts = (part.view(tokens, -1, attention.head_dim) for part in (q, k, v))
        step.attend(attention, *parts, out)
        return attention.o_proj(out.view(tokens, -1))


def _rotary_table(step: Step) -> Tensor:
    """(T, head_dim) float32: each token's cosines, then its sines; a row for every token, not every position."""
    half = step.cos.shape[-1] // 2
    return torch.cat((step.cos[:, 0, :half], step.sin[:, 0, half:]), dim=-1).float()


@contextlib.contextmanager
def fused(model: Llama, flashinfer: ModuleType) -> Iterator[None]:
    """Run the model's layers fused in here; captures keep what they saw."""
    model.model.fused = FusedLayers(model.model, flashinfer)
    try:
        yield
    finally:
        model.model.fused = None
