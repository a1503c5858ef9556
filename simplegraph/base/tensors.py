"""Identify a tensor's memory, also behind wrappers (DTensor, AsyncCollectiveTensor), whose own address says nothing."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from simplegraph.base.nested import map_leaves
from simplegraph.base.operators import wrapper_class

_PLAIN = frozenset({Tensor, nn.Parameter})


def storage_key(tensor: Tensor) -> int:
    """Identify a tensor's memory while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def is_wrapper(tensor: Tensor) -> bool:
    """True if the tensor has no memory of its own, and only wraps others that have."""
    return type(tensor) not in _PLAIN and wrapper_class(type(tensor))


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors whose memory it is: those that it wraps, or itself."""
    if not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(tensor, name)  # of a DTensor one is the device mesh
        if isinstance(inner, Tensor):
            yield from parts(inner)


def wait_collectives(value: Any) -> Any:
    """Wait for every AsyncCollectiveTensor in a value, and replace it by the tensor it stands for.

    One that leaves a capture unwaited records its wait in whatever touches it first, outside the graph:
    "CUDA error: invalid argument", which engines report as DTensor models that cannot be captured.
    """
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    kind: Any = getattr(collectives, "AsyncCollectiveTensor", None)
    if kind is None:  # not imported, or by another thread right now: then there is none
        return value
    return map_leaves(value, lambda leaf: issubclass(type(leaf), kind), operator.methodcaller("wait"))


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """Sort dimensions by falling stride; this keeps ``channels_last`` and its like."""
    natural = tuple(range(tensor.dim()))
    strides = tensor.stride()
    if tensor.is_contiguous():
        # With one channel, or one pixel, images are contiguous either way, and convolutions go by the strides.
        last = (0, *natural[2:], 1)
        is_last = len(natural) in (4, 5) and strides == _strides(tensor.shape, last) != _strides(tensor.shape, natural)
        return last if is_last else natural
    order = tuple(sorted(natural, key=lambda dim: (-strides[dim], dim)))
    return order if tensor.permute(order).is_contiguous() else natural


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose dimensions lie in this order, without gaps."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def has_address(tensor: Tensor) -> bool:
    """True if the tensor is memory that a graph can read."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or is_lazy(tensor))


def lies_at(tensor: Tensor) -> tuple[Any, ...]:
    """Tell where a tensor lies and how: the same memory transposed or negated is other numbers to a graph."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj()
