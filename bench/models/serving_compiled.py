"""The serving Llama compiled piecewise: one trace split at attention and recurrences, Inductor over every piece."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx, nn

from bench.models.attention import unsafe_tags
from bench.models.llama import Attention, Llama
from bench.models.mamba import Mamba2
from bench.tools.pieces import Pieces
from simplegraph.attention import AttentionBackend, BackendGroup

_backends: weakref.WeakValueDictionary[int, AttentionBackend | BackendGroup] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class CompiledLayers(nn.Module):
    """A decoder's plain layers, compiled at the first call for any number of tokens.

    Attention is one operator with the tag `cudagraph_unsafe`, as is a recurrence: the trace and piecewise captures are
    split at them.

    Args:
        llama: weights; its own cache is not used.
        backend: attention and the cache.
    """

    def __init__(self, llama: Llama, backend: AttentionBackend | BackendGroup) -> None:
        super().__init__()
        self._layers = _Layers(llama, next(_numbers))
        self._backend = _backends[self._layers.number] = backend
        self._compiled = torch.compile(
            self._layers, fullgraph=True, backend=_split, options={"guard_filter_fn": _of_this_backend}
        )
        self._traced = False

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute final hidden states, (T, hidden_size), of tokens and their positions, (T,) int64 both."""
        if not self._traced:
            for rows in (input_ids, positions):
                torch._dynamo.mark_dynamic(rows, 0)
        found: Tensor = self._compiled(input_ids, positions)
        self._traced = True
        return found


class _Layers(nn.Module):
    """The module that is compiled."""

    def __init__(self, llama: Llama, number: int) -> None:
        super().__init__()
        self.decoder, self.number = llama.model, number

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        decoder = self.decoder
        hidden = decoder.embed_tokens(input_ids)
        return decoder.run_layers(hidden, CompiledStep(*decoder.rotary_emb(positions, hidden.dtype), self.number))


class CompiledStep:
    """A step whose attention calls the operator; cos, sin as in `LlamaStep`."""

    windows = True

    def __init__(self, cos: Tensor, sin: Tensor, number: int) -> None:
        self.cos, self.sin, self._number = cos, sin, number

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        torch.ops.bench.serving_attention(q, k, v, out, layer.index, self._number)

    def recur(self, layer: Mamba2, xbc: Tensor, dt: Tensor, out: Tensor) -> None:
        torch.ops.bench.serving_recurrence(xbc, dt, out, layer.index, self._number)


def _of_this_backend(guards: Sequence[Any]) -> list[bool]:
    """Keep only the guard on the backend's number: other engines must not run this one's compiled code."""
    return [guard.name.endswith(".number") for guard in guards]


def _split(traced: fx.GraphModule, example_inputs: list[object], **_: object) -> Pieces:
    return Pieces(traced, example_inputs)


def _serving_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, layer: int, number: int) -> None:
    """Write this step's keys and values, then attend, by the backend with this number."""
    backend = _backends[number].of_layer(layer)
    backend.cache.write(layer, k, v, backend.live.slot_mapping)
    backend.run(layer, q, out, backend.live)


def _serving_recurrence(xbc: Tensor, dt: Tensor, out: Tensor, layer: int, number: int) -> None:
    """Advance the states of this step's requests, by the backend with this number."""
    backend = _backends[number].of_layer(layer)
    backend.run(layer, (xbc, dt), out, backend.live)


_library = torch.library.Library("bench", "FRAGMENT")
_library.define(
    "serving_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer, int number) -> ()",
    tags=unsafe_tags(),
)
_library.define(
    "serving_recurrence(Tensor xbc, Tensor dt, Tensor(a!) out, int layer, int number) -> ()", tags=unsafe_tags()
)
for _name, _function in (("serving_attention", _serving_attention), ("serving_recurrence", _serving_recurrence)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)
    _library._register_fake(_name, lambda *args: None)
