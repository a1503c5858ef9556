"""The Llama's layers with FlashInfer's fused operators: residual + RMSNorm, rotary positions, SiLU-and-mul.

The weights, caches and attention are the same, with a third of the kernels. A compiler fuses the plain
operators by itself; an engine without one calls these. The compiled arms use the plain layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from bench.models.llama import Attention, DecoderLayer, Llama, LlamaDecoder, LlamaStep, Tap


class FusedLayers:
    """Runs a decoder's layers.

    Args:
        decoder: on a GPU, with heads of 64, 128 or 256 elements.
        flashinfer: the module; its kernels are compiled at their first use, and cached on disk.
    """

    def __init__(self, decoder: LlamaDecoder, flashinfer: ModuleType) -> None:
        self._decoder = decoder
        self._ops = flashinfer
        # The norm that comes after each layer: the next layer's first, and the last of all.
        self._norms_after = [*(layer.input_layernorm for layer in list(decoder.layers)[1:]), decoder.norm]
        self._rows = torch.arange(len(decoder.query_start_loc) - 1, device=decoder.query_start_loc.device)

    def __call__(self, hidden: Tensor, step: LlamaStep, tap: Tap | None = None) -> Tensor:
        """Compute final hidden states from embeddings, (T, hidden_size) both."""
        self._step, self._rotary = step, _rotary_table(step)
        return self.run_layers(hidden, tap)

    def run_layers(self, hidden: Tensor, tap: Tap | None = None) -> Tensor:
        """Do as a call, for the step that `attend` has."""
        decoder, ops = self._decoder, self._ops
        residual = hidden
        hidden = ops.rmsnorm(hidden, decoder.layers[0].input_layernorm.weight, decoder.norm.eps)
        for index, (layer, norm) in enumerate(zip(decoder.layers, self._norms_after, strict=True)):
            if tap is not None:
                tap(index, residual)
            hidden = self.mix(layer, hidden)
            ops.fused_add_rmsnorm(hidden, residual, layer.post_attention_layernorm.weight, decoder.norm.eps)
            hidden = layer.mlp.down_proj(ops.silu_and_mul(layer.mlp.gate_up_proj(hidden)))
            ops.fused_add_rmsnorm(hidden, residual, norm.weight, decoder.norm.eps)
        return hidden

    def mix(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        """Compute one layer's attention or recurrence, with its projections: (T, hidden_size) to the same."""
        return self.attend(layer.self_attn, hidden)

    def attend(self, layer: Attention, hidden: Tensor) -> Tensor:
        """Compute one layer's attention with its projections: (T, hidden_size) to the same."""
        tokens = hidden.shape[0]
        rows = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        qkv = layer.qkv_proj(hidden)
        q, k, v = qkv.split([heads * layer.head_dim for heads in rows], dim=-1)
        self._ops.rope.apply_rope_with_cos_sin_cache_inplace(
            self._rows[:tokens], q, k, layer.head_dim, self._rotary, is_neox=True
        )
        layer.check_window(self._step)
        out = hidden.new_empty(tokens, layer.num_heads, layer.head_dim)
        parts = (part.view(tokens, -1, layer.head_dim) for part in (q, k, v))
        self._step.attend(layer, *parts, out)
        return layer.o_proj(out.view(tokens, -1))


def _rotary_table(step: LlamaStep) -> Tensor:
    """Make (T, head_dim) float32: each token's cosines, then its sines; one row per token, not per position."""
    half = step.cos.shape[-1] // 2
    return torch.cat((step.cos[:, 0, :half], step.sin[:, 0, half:]), dim=-1).float()


@contextlib.contextmanager
def fused(model: Llama, flashinfer: ModuleType) -> Iterator[None]:
    """Run the model's layers fused in this context; graphs captured in it stay fused."""
    model.model.fused = FusedLayers(model.model, flashinfer)
    try:
        yield
    finally:
        model.model.fused = None
