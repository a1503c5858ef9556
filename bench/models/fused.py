"""The Llama's layers on fused operators: residual + RMSNorm, rotary positions, SiLU-and-mul.

The weights, caches and attention are the same, with a third of the kernels. A compiler fuses the plain
operators by itself; an engine without one calls these. The compiled arms use the plain layers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.models.llama import MLP, Attention, DecoderLayer, Llama, LlamaDecoder, LlamaStep, Tap
from bench.models.shard import Project, RowParallel, Stages, at_once, finish
from simplegraph.fused.choice import operators_for
from simplegraph.fused.torch_operators import KernelTrial, Operators

# Computes one layer's attention or recurrence, with its projections: (T, hidden_size) to the same. It carries the
# step's tensors, which the layers must not keep: those of a capture exist only inside the graph.
Mixer = Callable[[DecoderLayer, Tensor], Stages]


class FusedLayers:
    """Runs a decoder's layers.

    Args:
        decoder: the decoder.
        operators: the fused operators; by default Triton's kernels where they run, which compiles them.
    """

    def __init__(self, decoder: LlamaDecoder, operators: Operators | None = None) -> None:
        self._decoder = decoder
        self.operators = operators or decoder_operators(
            decoder, KernelTrial("rotate", (decoder.attentions[0].head_dim,))
        )
        # The norm that comes after each layer: the next layer's first, and the last of all.
        self._norms_after = [*(layer.input_layernorm for layer in list(decoder.layers)[1:]), decoder.norm]

    def __call__(self, hidden: Tensor, step: LlamaStep, tap: Tap | None = None) -> Tensor:
        """Compute final hidden states from embeddings, (T, hidden_size) both."""
        sin = _plain_sin(step)

        def mix(layer: DecoderLayer, hidden: Tensor) -> Stages:
            return self.project(at_once, layer.self_attn.o_proj, self._attend(layer.self_attn, hidden, step, sin))

        return finish(self.layers(hidden, mix, tap))

    def layers(self, hidden: Tensor, mix: Mixer, tap: Tap | None = None, project: Project = at_once) -> Stages:
        """Do as a call, with the attention or recurrence that `mix` computes, and projections down by `project`."""
        decoder, add_rms_norm = self._decoder, self.operators.add_rms_norm
        eps, residual = decoder.norm.eps, hidden
        hidden = decoder.layers[0].input_layernorm(hidden)
        for index, (layer, norm) in enumerate(zip(decoder.layers, self._norms_after, strict=True)):
            if tap is not None:
                tap(index, residual)
            hidden = yield from mix(layer, hidden)
            hidden, residual = add_rms_norm(hidden, residual, layer.post_attention_layernorm.weight, eps)
            hidden = yield from self.project(project, layer.mlp.down_proj, self._gate(layer.mlp, hidden))
            hidden, residual = add_rms_norm(hidden, residual, norm.weight, eps)
        return hidden

    def _gate(self, mlp: MLP, hidden: Tensor) -> Tensor:
        if len(hidden) > 1:
            return self.operators.gated(*mlp.gate_up_proj(hidden).chunk(2, dim=-1), "silu")
        return self.operators.linears(
            *(hidden, [mlp.gate_proj.weight, mlp.up_proj.weight], [mlp.gate_proj.bias, mlp.up_proj.bias], "silu")
        )[2]

    def multiply(self, linear: Any, hidden: Tensor) -> Tensor:
        """Run a projection; one row by a kernel that leaves no part of the GPU idle."""
        return self.operators.linears(hidden, [linear.weight], [linear.bias])[0]

    def project(self, project: Project, linear: Any, hidden: Tensor) -> Stages:
        """Run a projection down, by `project` if ranks sum."""
        run = functools.partial(self.multiply, linear)
        return project(linear, hidden) if isinstance(linear, RowParallel) else at_once(run, hidden)

    def _attend(self, layer: Attention, hidden: Tensor, step: LlamaStep, sin: Tensor) -> Tensor:
        layer.check_window(step)
        tokens, rotated = hidden.shape[0], layer.num_heads + layer.num_kv_heads
        heads = self.multiply(layer.qkv_proj, hidden).view(tokens, -1, layer.head_dim)
        q, k = layer.norm(heads[:, :rotated]).split((layer.num_heads, layer.num_kv_heads), dim=1)
        q, k = self.operators.rotate(q.unsqueeze(2), k.unsqueeze(2), step.cos, sin)
        out = hidden.new_empty(tokens, layer.num_heads, layer.head_dim)
        step.attend(layer, q.squeeze(2), k.squeeze(2), heads[:, rotated:], out)
        return out.view(tokens, -1)


def decoder_operators(decoder: LlamaDecoder, *rotary: KernelTrial) -> Operators:
    """Return Triton's operators for a decoder where they run, else torch's; `rotary` tries those before attention."""
    weight, mlp, first = decoder.embed_tokens.weight, decoder.layers[0].mlp, decoder.attentions[0]
    linears = (first.qkv_proj, first.o_proj, mlp.down_proj)
    trials = (
        *(KernelTrial("linears", (each.weight.shape[1], int(each.bias is not None))) for each in linears),
        KernelTrial("linears", (weight.shape[1], int(mlp.gate_proj.bias is not None), "silu")),
        KernelTrial("add_rms_norm", (weight.shape[1],)),
        KernelTrial("gated", (mlp.gate_proj.out_features, "silu")),
        *(KernelTrial("gated_rms_norm", (each.out_proj.in_features,)) for each in decoder.recurrences[:1]),
        *rotary,
    )
    return operators_for(weight.device, weight.dtype, trials)


def _plain_sin(step: LlamaStep) -> Tensor:
    """Return the step's sines, (T, 1, head_dim), without the sign of their first half."""
    half = step.sin[..., step.sin.shape[-1] // 2 :]
    return torch.cat((half, half), dim=-1)


@contextlib.contextmanager
def fused(model: Llama) -> Iterator[Operators]:
    """Run the model's layers fused in this context; graphs captured in it stay fused. Yields the operators."""
    layers = model.model.fused = FusedLayers(model.model)
    try:
        yield layers.operators
    finally:
        model.model.fused = None
