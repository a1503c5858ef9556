"""The serving Llama on fused operators, with one kernel for the steps before attention.

The kernel norms (Qwen3) and rotates queries and keys, and writes keys and values to their pages: one launch in
place of three to five.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.models.fused import FusedLayers, decoder_operators
from bench.models.llama import Attention, DecoderLayer, LlamaDecoder, Tap
from bench.models.serving_step import ServingStep
from bench.models.shard import Project, Stages, at_once, finish, handing_over
from simplegraph.attention import AttentionBackend, BackendGroup, attend
from simplegraph.attention.layers import current_backend
from simplegraph.fused.torch_operators import KernelTrial, Operators, RotaryWrite


class ServingLayers(FusedLayers):
    """Runs a decoder's layers over simplegraph's paged attention.

    Args:
        decoder, operators: as for `FusedLayers`.
        backend: attention and the cache.
        max_num_tokens: tokens of a step.
    """

    def __init__(
        self,
        decoder: LlamaDecoder,
        operators: Operators,
        backend: AttentionBackend | BackendGroup,
        max_num_tokens: int,
    ) -> None:
        super().__init__(decoder, operators)
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
        return finish(self.stages(hidden, positions, tap, at_once))

    def stages(
        self, hidden: Tensor, positions: Tensor, tap: Tap | None = None, project: Project = handing_over
    ) -> Stages:
        """Do as `run`, and yield while ranks sum."""
        step = ServingStep(*self._decoder.rotary_emb(positions, hidden.dtype)) if self._plain else None

        def mix(layer: DecoderLayer, hidden: Tensor) -> Stages:
            if layer.mamba is not None:
                return layer.mamba(hidden, step, self.operators)
            if self._whole_heads:
                heads = self._attend_pages(layer.self_attn, hidden, positions)
            else:
                heads = layer.self_attn.attend(hidden, step)
            return (yield from self.project(project, layer.self_attn.o_proj, heads))

        return self.layers(hidden, mix, tap, project)

    def _attend_pages(self, layer: Attention, hidden: Tensor, positions: Tensor) -> Tensor:
        tokens = hidden.shape[0]
        qkv = self.multiply(layer.qkv_proj, hidden).view(tokens, -1, layer.head_dim)
        backend: AttentionBackend = current_backend("rotate_and_write", layer.index, AttentionBackend)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm.weight, layer.k_norm.weight)
        pages, slots = backend.cache.pages(layer.index), backend.live.slot_mapping
        cached = RotaryWrite(positions, self._table, pages, slots, layer.num_heads, norms, self._norm_eps)
        self.operators.rotate_and_write(qkv, cached)
        out = self._out[:tokens]
        attend(qkv[:, : layer.num_heads], None, None, layer.index, out=out)
        return out.view(tokens, -1)


def serving_operators(decoder: LlamaDecoder, backend: AttentionBackend | BackendGroup) -> Operators:
    """Return Triton's operators for the layers where they run, else torch's; that compiles them."""
    layer = decoder.attentions[0]
    if 2 * len(decoder.rotary_emb.inv_freq) != layer.head_dim:  # plain attention runs
        return decoder_operators(decoder)
    page_size = backend.of_layer(layer.index).cache.page_size
    sizes = (layer.num_heads, layer.num_kv_heads, layer.head_dim, page_size, int(layer.q_norm is not None))
    return decoder_operators(decoder, KernelTrial("rotate_and_write", sizes))
