"""Reads calls under grad mode: every size tells graphs apart, since nothing is padded there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from simplegraph.config import BatchDim
from simplegraph.module.args import TensorArg
from simplegraph.module.signature import CallReader
from simplegraph.reasons import CannotBind, Reason


class ExactReader(CallReader):
    """Reads calls as any reader does, but finds no batch dimension; the batch is the first size of the first tensor."""

    def _anchor(self, leaves: Sequence[Any], names: Sequence[str], tensors: Sequence[int]) -> tuple[int, int]:
        for index in tensors:
            if leaves[index].dim():
                return index, 0
        raise CannotBind(Reason.AMBIGUOUS_BATCH_DIM, "no tensor argument has a dimension")

    def _batch_dim(self, name: str, tensor: Tensor, batch: int, seen: dict[int, tuple[int, ...]]) -> BatchDim:
        return None

    def _tensor(self, name: str, tensor: Tensor, batch_dim: BatchDim) -> TensorArg:
        declared = self._declared(name, tensor)[1]
        return super()._tensor(name, tensor, "reference" if declared == "reference" else None)
