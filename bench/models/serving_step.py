"""The data that a Llama's layers share in a step over simplegraph's paged attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from bench.models.llama import Attention
from bench.models.mamba import Mamba2
from simplegraph.attention import attend, recur


class ServingStep(NamedTuple):
    """A step whose requests are the attention backend's; cos, sin as in `LlamaStep`."""

    cos: Tensor
    sin: Tensor
    windows = True

    def attend(self, layer: Attention, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        attend(q, k, v, layer.index, out=out)

    def recur(self, layer: Mamba2, xbc: Tensor, dt: Tensor, out: Tensor) -> None:
        recur(layer.index, xbc, dt, out=out)
