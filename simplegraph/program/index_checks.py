"""Stop a run at an index that is out of range, before a kernel reads there, which ends the process's use of the GPU.

The library runs forwards on fewer rows than a call has; indices that are valid for the call may be invalid there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.operators import OperatorMode, argument, facts_of, strided_tensors, without_modes

_BY_DIM = frozenset(
    {
        *("index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
        *("gather", "scatter", "scatter_add", "scatter_reduce"),
    }
)
_BY_LIST = frozenset({"index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"})
_BY_ROW = frozenset({"embedding", "embedding_renorm", "_embedding_bag", "_embedding_bag_forward_only"})
_BY_ELEMENT = frozenset({"take", "put"})
_BY_CLASS = frozenset({"nll_loss_forward", "nll_loss2d_forward"})
INDICES = frozenset({torch.int64, torch.int32})  # dtypes of indices


class _Index(NamedTuple):
    """An index of a dimension, and the valid range of its values."""

    values: Tensor
    first: int
    size: int
    ignored: int | None = None


class IndexChecks(OperatorMode):  # type: ignore[no-untyped-call]
    """Checks the indices of each of torch's operators on the host before the operator runs. Raises IndexError."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Check the indices of an operator, and run it."""
        facts = facts_of(func)
        tensors = strided_tensors((*args, *kwargs.values()))
        if facts.is_composite and any(tensor.dtype in INDICES for tensor in tensors):
            return self.take_apart(func, args, kwargs)
        for index in indices_of(facts.name.rstrip("_"), args, kwargs):
            with without_modes():
                values = index.values if index.ignored is None else index.values[index.values != index.ignored]
                low, high = map(int, torch.aminmax(values)) if values.numel() else (index.first, index.first)
            if low < index.first or high >= index.size:
                wrong = low if low < index.first else high
                raise IndexError(f"{func} is passed the index {wrong}, and the dimension has size {index.size}")
        return self.leave(func, args, kwargs)


def indices_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[_Index]:
    """Yield the indices that an operator of this name is passed: (values, first, size, ignored)."""
    if name in _BY_DIM:
        tensor, dim, index = (argument(args, kwargs, *place) for place in ((0, "self"), (1, "dim"), (2, "index")))
        if isinstance(dim, int):
            yield _Index(index, 0, tensor.shape[dim] if tensor.dim() else 1)
    elif name in _BY_LIST:
        tensor, indices = args[:2]
        dim = 0
        for index in indices:
            is_index = index is not None and index.dtype in INDICES
            if is_index:
                yield _Index(index, -tensor.shape[dim], tensor.shape[dim])
            dim += 1 if index is None or is_index else index.dim()  # a mask has several
    elif name in _BY_ROW:
        yield _Index(args[1], 0, args[0].shape[0])
    elif name in _BY_ELEMENT:
        yield _Index(args[1], -args[0].numel(), args[0].numel())
    elif name in _BY_CLASS:
        yield _Index(args[1], 0, args[0].shape[1 if args[0].dim() > 1 else 0], args[4])
