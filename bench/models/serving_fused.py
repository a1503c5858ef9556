"""The serving Llama on fused operators: FlashInfer's, and one Triton kernel for the steps before attention.

The kernel norms (Qwen3) and rotates queries and keys, and writes keys and values to their pages: one launch in
place of three to five. Imported only if both libraries are installed.
"""

from __future__ import annotations

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.models.fused import FusedLayers
from bench.models.llama import Attention, DecoderLayer, LlamaDecoder, Tap
from bench.models.serving_step import ServingStep
from simplegraph.attention import AttentionBackend, BackendGroup, attend


class ServingLayers(FusedLayers):
    """Runs a decoder's layers over simplegraph's paged attention.

    Args:
        decoder, flashinfer: as for `FusedLayers`.
        backend: attention and the cache.
        max_num_tokens: tokens of a step.
    """

    def __init__(
        self,
        decoder: LlamaDecoder,
        flashinfer: ModuleType,
        backend: AttentionBackend | BackendGroup,
        max_num_tokens: int,
    ) -> None:
        super().__init__(decoder, flashinfer)
        self._backend = backend
        first = decoder.attentions[0]
        weight = decoder.embed_tokens.weight
        # One output for all layers: each is read before the next is written. Padding rows keep the zeros.
        shape = (max_num_tokens, first.num_heads, first.head_dim)
        self._out = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        positions = torch.arange(backend.of_layer(first.index).metadata.max_model_len, device=weight.device)
        cos, sin = decoder.rotary_emb(positions, torch.float32)
        # The kernel rotates whole heads; models that rotate a part of each run their plain attention.
        self._whole_heads = cos.shape[-1] == first.head_dim
        self._plain = bool(decoder.recurrences) or not self._whole_heads
        half = cos.shape[-1] // 2
        # (max_model_len, head_dim) float32: the cosines of a position, then its sines.
        self._table = torch.cat((cos[:, 0, :half], sin[:, 0, half:]), dim=-1).contiguous()
        self._norm_eps = decoder.norm.eps

    def run(self, hidden: Tensor, positions: Tensor, tap: Tap | None = None) -> Tensor:
        """Compute final hidden states from embeddings, (T, hidden_size) both."""
        self._positions = positions
        if self._plain:
            self._step = ServingStep(*self._decoder.rotary_emb(positions, hidden.dtype))
        return self.run_layers(hidden, tap)

    def mix(self, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        if layer.mamba is not None:
            return layer.mamba(hidden, self._step)
        return super().mix(layer, hidden) if self._whole_heads else layer.self_attn(hidden, self._step)

    def attend(self, layer: Attention, hidden: Tensor) -> Tensor:
        tokens = hidden.shape[0]
        qkv = layer.qkv_proj(hidden).view(tokens, -1, layer.head_dim)
        backend = self._backend.of_layer(layer.index)
        keys, values = backend.cache.keys(layer.index), backend.cache.values(layer.index)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm.weight, layer.k_norm.weight)
        slots = backend.live.slot_mapping
        rotate_and_write(qkv, self._positions, self._table, keys, values, slots, layer.num_heads, norms, self._norm_eps)
        out = self._out[:tokens]
        attend(qkv[:, : layer.num_heads], None, None, layer.index, out=out)
        return layer.o_proj(out.view(tokens, -1))


_HEADS = 8  # heads per program of the kernel


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    token_stride,
    page_stride,
    offset_stride,
    head_stride,
    page_size,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one token and some of its heads in each program: queries, keys and values, in this order."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    row = qkv_ptr + token * token_stride + head * (2 * HALF) + column
    first, second = tl.load(row, exists, 0.0), tl.load(row + HALF, exists, 0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        norm = tl.where(is_query, q_norm_ptr + column, k_norm_ptr + column)
        x = x * scale * tl.load(norm).to(tl.float32)
        y = y * scale * tl.load(norm + HALF).to(tl.float32)
    angle = table_ptr + tl.load(positions_ptr + token) * (2 * HALF) + column
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    first = tl.where(is_value, first, (x * cos - y * sin).to(first.dtype))
    second = tl.where(is_value, second, (y * cos + x * sin).to(second.dtype))
    tl.store(row, first, is_query)
    tl.store(row + HALF, second, is_query)
    slot = tl.load(slots_ptr + token)
    place = (slot // page_size) * page_stride + (slot % page_size) * offset_stride
    kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    target = tl.where(is_value, values_ptr + place, keys_ptr + place) + kv_head * head_stride + column
    written = exists & (head >= NUM_HEADS) & (slot >= 0)
    tl.store(target, first, written)
    tl.store(target + HALF, second, written)


def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Norm and rotate queries in place; norm and rotate keys, and write them and the values to their pages.

    Args:
        qkv: (T, num_heads + 2 * num_kv_heads, head_dim), contiguous; head_dim a power of 2.
        positions: (T,) int64.
        table: (max_model_len, head_dim) float32, cosines and sines.
        keys, values: (num_pages, page_size, num_kv_heads, head_dim), with the same strides.
        slots: (T,) int64, page * page_size + offset; -1 for none.
        norms: weights of the norms of queries and keys, (head_dim,); None for no norm.
    """
    tokens, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    _rotate_and_write[(tokens, triton.cdiv(heads, _HEADS))](
        qkv,
        positions,
        table,
        keys,
        values,
        slots,
        q_norm,
        k_norm,
        eps,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        keys.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        NORMED=norms is not None,
        BLOCK=_HEADS,
    )
