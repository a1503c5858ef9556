"""A Llama for decoding in the style of users' code: plain torch operators, a paged KV cache, no fusion.

Batches are flat: one token per request, T tokens for T requests. Weights carry the names of Hugging
Face checkpoints. Qwen2 and Qwen3 are Llamas but for biases and a norm of queries and keys, Bamba but for layers with
Mamba2 in place of attention (`LlamaKind`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.models import attention
from bench.models.joined import Joined
from bench.models.llama_kinds import attention_window, config_dtype, is_recurrent, llama_kind
from bench.models.mamba import Mamba2
from bench.models.rotary import RotaryEmbedding, head_dim, rotate
from bench.models.shard import WHOLE, Shard, Stages, handing_over, normal_part

if TYPE_CHECKING:
    from transformers import LlamaConfig

# Called before each layer with its index and its input, (T, hidden_size), which is valid during the call.
Tap = Callable[[int, Tensor], None]


class CacheShape(NamedTuple):
    """The paged cache of every layer; page 0 is scratch."""

    num_pages: int
    page_size: int


class LlamaStep(Protocol):
    """Data that the layers of one forward share; cos, sin: (T, 1, rotary_dim), sin negated in its first half.

    A step whose attention knows windows has an attribute `windows` that is True. One with states for recurrent layers
    has a method `recur(layer, xbc, dt, out)`; see `simplegraph.attention.Mamba2Backend`.
    """

    @property
    def cos(self) -> Tensor: ...

    @property
    def sin(self) -> Tensor: ...

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Compute one layer's attention into `out`.

        Args:
            q, out: (T, num_heads, head_dim).
            k, v: (T, num_kv_heads, head_dim), of this step, not in the cache yet.
        """


# Runs all layers: from embeddings, (T, hidden_size), to final hidden states.
LayerRunner = Callable[[Tensor, LlamaStep, Tap | None], Tensor]


class LlamaDecodeStep(NamedTuple):
    """One token of every request.

    slots: (T,) int64, padding at 0. seq_lens: (T,) int32. block_table: (T, max_blocks) int32.
    query_start_loc: (T + 1,) int32.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    seq_lens: Tensor
    block_table: Tensor
    query_start_loc: Tensor

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        attend = torch.ops.bench.paged_attention if torch.compiler.is_compiling() else attention.attend
        attend(q, k, v, layer.k_cache, layer.v_cache, out, *self[2:], layer.head_dim**-0.5)


class Attention(nn.Module):
    """Grouped-query attention over the layer's own paged cache."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, config: LlamaConfig, cache: CacheShape, index: int) -> None:
        super().__init__()
        self.index = index
        self.window = attention_window(config, index)
        self.head_dim = head_dim(config)
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        hidden, bias, kind = config.hidden_size, getattr(config, "attention_bias", False), llama_kind(config)
        qkv_bias = bias if kind.qkv_bias is None else kind.qkv_bias
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=qkv_bias)
        o_bias = bias if kind.o_bias is None else kind.o_bias
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=o_bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, config.rms_norm_eps) if kind.qk_norm else None for _ in range(2)
        )
        self.qkv_proj = Joined(self.q_proj, self.k_proj, self.v_proj)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.empty(*cache, self.num_kv_heads, self.head_dim), persistent=False)

    def forward(self, hidden: Tensor, step: LlamaStep) -> Tensor:
        return self.o_proj(self.attend(hidden, step))

    def attend(self, hidden: Tensor, step: LlamaStep) -> Tensor:
        """Compute the heads' outputs, (T, num_heads * head_dim)."""
        self.check_window(step)
        tokens, rotated = hidden.shape[0], self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(hidden).view(tokens, -1, self.head_dim)
        turned = rotate(self.norm(heads[:, :rotated]), step.cos, step.sin)
        q, k = turned.split((self.num_heads, self.num_kv_heads), dim=1)
        v = heads[:, rotated:]
        # The output is allocated here, outside the operator: a compiler that splits at the operator
        # then has it in graph memory, at a fixed address.
        out = hidden.new_empty(tokens, self.num_heads, self.head_dim)
        step.attend(self, q, k, v, out)
        return out.view(tokens, -1)

    def check_window(self, step: LlamaStep) -> None:
        """Refuse a step that would attend to the whole context where the layer has a window.

        Raises:
            ValueError: it would.
        """
        if self.window is not None and not getattr(step, "windows", False):
            raise ValueError(
                f"layer {self.index} has sliding_window={self.window}; {type(step).__name__} attends to the whole "
                "context. Serve this model with bench.engine."
            )

    def norm(self, heads: Tensor) -> Tensor:
        """Norm the heads of queries and keys, (T, num_heads + num_kv_heads, head_dim), if the model does so."""
        if self.q_norm is None or self.k_norm is None:
            return heads
        return torch.cat((self.q_norm(heads[:, : self.num_heads]), self.k_norm(heads[:, self.num_heads :])), dim=1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act is {config.hidden_act!r}; this Llama knows 'silu'.")
        hidden, inner, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.gate_up_proj = Joined(self.gate_proj, self.up_proj)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.gated(hidden))

    def gated(self, hidden: Tensor) -> Tensor:
        """Compute what is projected down, (T, intermediate_size)."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, cache: CacheShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        recurrent = is_recurrent(config, index)
        self.self_attn = None if recurrent else Attention(config, cache, index)
        self.mamba = Mamba2(config, index) if recurrent else None
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, step: LlamaStep) -> Tensor:
        mixer = self.mamba if self.self_attn is None else self.self_attn
        hidden = hidden + mixer(self.input_layernorm(hidden), step)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def stages(self, hidden: Tensor, step: LlamaStep) -> Stages:
        """Do as `forward`, and yield while ranks sum."""
        normed = self.input_layernorm(hidden)
        if self.self_attn is None:
            hidden = hidden + self.mamba(normed, step)
        else:
            hidden = hidden + (yield from handing_over(self.self_attn.o_proj, self.self_attn.attend(normed, step)))
        gated = self.mlp.gated(self.post_attention_layernorm(hidden))
        return hidden + (yield from handing_over(self.mlp.down_proj, gated))


class LlamaDecoder(nn.Module):
    """Embedding, layers and final norm; named as in the checkpoints."""

    query_start_loc: Tensor

    def __init__(self, config: LlamaConfig, cache: CacheShape, max_batch: int) -> None:
        super().__init__()
        # Not drawn: on the meta device that would import torch's compiler.
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.layers = nn.ModuleList(DecoderLayer(config, cache, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.register_buffer("query_start_loc", torch.empty(max_batch + 1, dtype=torch.int32), persistent=False)
        self.fused: LayerRunner | None = None  # see `bench.models.fused`

    @property
    def attentions(self) -> list[Attention]:
        """The layers' attention, without recurrent layers."""
        return [layer.self_attn for layer in self.layers if layer.self_attn is not None]

    @property
    def recurrences(self) -> list[Mamba2]:
        """The recurrent layers' Mamba2."""
        return [layer.mamba for layer in self.layers if layer.mamba is not None]

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor, block_table: Tensor
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions, hidden.dtype)
        # Padding's slot -1 becomes slot 0, which lies in the scratch page.
        slots = slot_mapping.clamp(min=0)
        step = LlamaDecodeStep(cos, sin, slots, seq_lens, block_table, self.query_start_loc[: input_ids.shape[0] + 1])
        return self.run_layers(hidden, step)

    def run_layers(self, hidden: Tensor, step: LlamaStep, tap: Tap | None = None) -> Tensor:
        """From embeddings, (T, hidden_size), to final hidden states."""
        if self.fused is not None:
            return self.fused(hidden, step, tap)
        for index, layer in enumerate(self.layers):
            if tap is not None:
                tap(index, hidden)
            hidden = layer(hidden, step)
        return self.norm(hidden)

    def stages(self, hidden: Tensor, step: LlamaStep) -> Stages:
        """Do as `run_layers` on plain layers, and yield while ranks sum."""
        for layer in self.layers:
            hidden = yield from layer.stages(hidden, step)
        return self.norm(hidden)


class Llama(nn.Module):
    """A decoding Llama with its KV cache inside. Build one with `build_llama`.

    Args:
        config: a transformers `LlamaConfig`.
        cache: pages of every layer's KV cache, the scratch page included.
        max_batch: the largest batch, in requests.
        lm_head: True returns logits, False final hidden states.
        shard: this rank's share of the model.
        windows: True to allow layers with sliding windows and recurrent layers, which only `bench.engine` serves.
    """

    def __init__(
        self,
        config: LlamaConfig,
        cache: CacheShape,
        max_batch: int,
        *,
        lm_head: bool = True,
        shard: Shard = WHOLE,
        windows: bool = False,
    ) -> None:
        super().__init__()
        llama_kind(config)  # first, since configs of other architectures lack attributes that are read below
        layers = range(config.num_hidden_layers)
        if not windows and any(attention_window(config, layer) or is_recurrent(config, layer) for layer in layers):
            raise ValueError(
                "the config has windows (use_sliding_window) or recurrent layers; attention here is over the whole "
                "context. bench.engine serves models that are built with windows=True."
            )
        self.shard = shard
        config = self.config = shard.config(config)
        self.max_batch = max_batch
        self.model = LlamaDecoder(config, cache, max_batch)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if lm_head else None
        shard.split_rows(self)

    def forward(
        self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor, block_table: Tensor
    ) -> Tensor:
        """One decode step: T requests, one token each.

        Args:
            input_ids: (T,) int64.
            positions: (T,) int64, the position of each token in its request.
            slot_mapping: (T,) int64, slot of each key and value, page * page_size + offset; -1 for padding.
            seq_lens: (T,) int32, tokens in the cache after this step; 0 for padding.
            block_table: (T, max_blocks) int32, the pages of each request.

        Returns:
            (T, vocab_size) logits, or (T, hidden_size) without lm_head.
        """
        return self.head(self.model(input_ids, positions, slot_mapping, seq_lens, block_table))

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits of final hidden states; without lm_head return these."""
        return hidden if self.lm_head is None else self.lm_head(hidden)

    def reset_buffers(self, seed: int | None = None) -> None:
        """Fill the buffers: frequencies, row offsets, and the caches with noise (zeros without a seed)."""
        self.model.rotary_emb.reset()
        self.model.query_start_loc.copy_(torch.arange(self.max_batch + 1, dtype=torch.int32))
        generator = None if seed is None else torch.Generator(self.model.query_start_loc.device).manual_seed(seed)
        for attention_layer in self.model.attentions:
            for cache in (attention_layer.k_cache, attention_layer.v_cache):
                if generator is None:
                    cache.zero_()
                else:
                    pages, page_size, heads, size = cache.shape
                    whole = [pages, page_size, heads * self.shard.size, size]
                    normal_part(cache, whole, 2, self.shard, generator=generator)

    def own_name(self, name: str) -> str:
        """Return the name that a checkpoint's parameter has here."""
        for theirs, ours in llama_kind(self.config).renamed:
            name = name.replace(theirs, ours)
        return name

    def tie_weights(self) -> None:
        """Share the embedding with lm_head if the config says so."""
        if self.lm_head is not None and self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight


def build_llama(
    config: LlamaConfig,
    cache: CacheShape,
    max_batch: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    lm_head: bool = True,
    seed: int = 0,
    random_weights: bool = True,
    shard: Shard = WHOLE,
    windows: bool = False,
) -> Llama:
    """Build a Llama in eval mode; weights and caches are created directly on the device.

    Args:
        config: a transformers `LlamaConfig`.
        cache: pages of every layer's KV cache.
        max_batch: the largest batch, in requests.
        dtype: of weights and cache; the config's own by default.
        seed: of the random weights and cache contents; the same seed gives the same model on the same device.
        random_weights: False leaves the weights unset, for `load_checkpoint`.
        shard: this rank's share; a seed gives the same model on any number of ranks.
        windows: True to allow layers with sliding windows and recurrent layers, for `bench.engine`.

    Raises:
        ValueError: the ranks do not divide the heads or the MLP evenly, or the config is of no Llama.
    """
    with torch.device("meta"):
        model = Llama(config, cache, max_batch, lm_head=lm_head, shard=shard, windows=windows)
    materialize(model, device, dtype or config_dtype(config))
    model.tie_weights()
    model.reset_buffers(seed)
    if random_weights:
        randomize(model, config.initializer_range, seed, shard)
    return model


def materialize(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Allocate the memory of a model that is on the meta device, uninitialized, for inference."""
    for module in model.modules():
        if not isinstance(module, RotaryEmbedding):  # frequencies stay in float32
            module._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)
    # As `to_empty`, whose operator imports sympy on the meta device.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    for module in model.modules():
        if isinstance(module, Joined):
            module.join()
    model.requires_grad_(False).eval()


def randomize(model: nn.Module, std: float, seed: int, shard: Shard = WHOLE) -> None:
    """Fill a model with normal weights, unit norms and zero biases."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif weight.dim() == 1:
            weight.fill_(1.0)
        else:
            whole, dim = shard.whole_shape(name, weight), shard.split_dim(name)
            normal_part(weight, whole, dim, shard, std=std, generator=generator)
    for module in model.modules():
        if isinstance(module, Mamba2):
            module.reset_rates()
