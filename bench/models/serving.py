"""The Llama over simplegraph's paged attention: any batch, decoding and prefilling, in any kind of graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.models.llama import Llama, Tap
from bench.models.serving_fused import ServingLayers, serving_operators
from bench.models.serving_step import ServingStep
from bench.models.shard import Stages
from simplegraph.attention import AttentionBackend, BackendGroup


class ServingLlama(nn.Module):
    """A Llama for steps of any kind; call it inside `attending`.

    Args:
        llama: weights; its own cache is not used.
        backend: attention and the cache.
        max_num_tokens: tokens of a step.
        fused: True to run layers on fused operators, by torch where Triton's kernels do not run; None does so only in
            half precision, and where they run.
        compiled: True to run plain layers compiled, split at attention.
    """

    def __init__(
        self,
        llama: Llama,
        backend: AttentionBackend | BackendGroup,
        max_num_tokens: int,
        *,
        fused: bool | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.llama = llama
        self._fused = self._compiled = None
        if compiled:
            from bench.models.serving_compiled import CompiledLayers

            self._compiled = CompiledLayers(llama, backend)
        elif fused or (fused is None and llama.model.embed_tokens.weight.dtype in (torch.float16, torch.bfloat16)):
            operators = serving_operators(llama.model, backend)
            if fused or operators.triton:
                self._fused = ServingLayers(llama.model, operators, backend, max_num_tokens)
        self.train(llama.training)

    @property
    def fused(self) -> bool:
        """True if layers run on fused operators."""
        return self._fused is not None

    def forward(self, input_ids: Tensor, positions: Tensor, tap: Tap | None = None) -> Tensor:
        """Compute final hidden states, (T, hidden_size), of tokens and their positions, (T,) int64 both."""
        if self._compiled is not None:
            return self._compiled(input_ids, positions)
        decoder = self.llama.model
        hidden = decoder.embed_tokens(input_ids)
        if self._fused is not None:
            return self._fused.run(hidden, positions, tap)
        return decoder.run_layers(hidden, ServingStep(*decoder.rotary_emb(positions, hidden.dtype)), tap)

    def stages(self, input_ids: Tensor, positions: Tensor) -> Stages:
        """Do as `forward` does with layers that are not compiled, and yield while ranks sum."""
        decoder = self.llama.model
        hidden = decoder.embed_tokens(input_ids)
        if self._fused is not None:
            return self._fused.stages(hidden, positions)
        return decoder.stages(hidden, ServingStep(*decoder.rotary_emb(positions, hidden.dtype)))
