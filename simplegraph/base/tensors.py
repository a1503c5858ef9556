"""Facts about a tensor's memory and layout, also for wrappers (DTensor, AsyncCollectiveTensor) without own memory."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from simplegraph.base.nested import map_leaves
from simplegraph.base.operators import wrapper_class

_PLAIN = frozenset({Tensor, nn.Parameter})
_tensor_of = operator.attrgetter("tensor")
# Private to torch: the owners of a storage, by its key, and of a tensor. Without them, memory never counts as released
# by others, and only a gradient whose buffer the user holds looks shared.
storage_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
_tensor_uses: Any = getattr(Tensor, "_use_count", lambda _: 0)
TELLS_OWNERS = hasattr(torch._C, "_storage_Use_Count") and hasattr(Tensor, "_use_count")


def storage_key(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's memory while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def wants_grad(leaf: Any) -> bool:
    """True for a tensor that requires grad."""
    return issubclass(type(leaf), Tensor) and leaf.requires_grad


def is_wrapper(tensor: Tensor) -> bool:
    """True if the tensor has no memory of its own, and wraps tensors with memory."""
    return type(tensor) not in _PLAIN and wrapper_class(type(tensor))


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that have the memory: those that the tensor wraps, or the tensor itself."""
    if not is_wrapper(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        inner = getattr(tensor, name)  # one of a DTensor's is the device mesh
        if isinstance(inner, Tensor):
            yield from parts(inner)


class OwnedTensor:
    """Owns a tensor, and shows if everything else has released it and its memory.

    Args:
        tensor: the tensor.
        counts: False if other objects of this library may hold the tensor, so that reference counts are of no use.
    """

    __slots__ = ("_storage", "_tells", "_was_shared", "tensor")

    def __init__(self, tensor: Tensor, *, counts: bool = True) -> None:
        self.tensor = tensor
        self._tells = counts and TELLS_OWNERS
        self._storage = tensor.untyped_storage()  # owned, since torch counts this object, too, while it lives
        self._was_shared = False

    def note_holders(self) -> None:
        """Note if something else holds the memory now. Nothing holds memory that the forward makes at each run."""
        self._was_shared = self._was_shared or (self._tells and self.uses() != _uses_alone())

    def is_released(self) -> bool:
        """True if something else held the memory when holders were noted, and nothing does now."""
        return self._was_shared and self.uses() == _uses_alone()

    def was_never_held(self) -> bool:
        """True if nothing else held the memory when holders were noted, and nothing does now."""
        return self._tells and not self._was_shared and self.uses() == _uses_alone()

    def uses(self) -> tuple[int, int, int]:
        """Count the references to the Python object, the tensor and the memory."""
        references = next(map(sys.getrefcount, map(_tensor_of, (self,))))  # counted as `held_by_nobody` does
        return references, _tensor_uses(self.tensor), storage_uses(self._storage._cdata)


@functools.cache
def _uses_alone() -> tuple[int, int, int]:
    """Count the references to a tensor that nothing else holds; the counts depend on torch and Python."""
    return OwnedTensor(torch.zeros(1, device="cpu")).uses()


def held_by_nobody(owned: Sequence[OwnedTensor]) -> list[OwnedTensor]:
    """List the tensors without another Python reference: a fast check before `is_released`."""
    alone, counts = _uses_alone()[0], list(map(sys.getrefcount, map(_tensor_of, owned)))
    return [] if min(counts) > alone else [each for each, count in zip(owned, counts, strict=True) if count <= alone]


def wait_collectives(value: Any) -> Any:
    """Wait for every AsyncCollectiveTensor in a value, and replace it by the wrapped tensor.

    If such a tensor leaves a capture without a wait, it waits at its first use outside the graph, which fails with
    "CUDA error: invalid argument". Engines report this as DTensor models that cannot be captured.
    """
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    kind: Any = getattr(collectives, "AsyncCollectiveTensor", None)
    if kind is None:  # not imported, or still being imported: then there is no such tensor
        return value
    return map_leaves(value, lambda leaf: issubclass(type(leaf), kind), operator.methodcaller("wait"))


class Layout(NamedTuple):
    """The layout of a tensor's elements, as far as views and results depend on it, without the size of gaps.

    Attributes:
        order: the dimensions from the largest to the smallest stride, for memory formats.
        gaps: the dimensions whose rows are not adjacent in memory.
        repeated: the dimensions whose rows are all the same memory, as after `expand`.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()

    def strides(self, shape: Sequence[int], gap: int = 0) -> tuple[int, ...]:
        """Return the strides of a tensor of this layout with gaps of `gap` elements."""
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            if gap and dim in self.gaps:
                step += gap if step > 1 else 1
            strides[dim] = step
            step *= max(shape[dim], 1)
        return tuple(strides)

    def __str__(self) -> str:
        """Describe how the layout differs from a contiguous one."""
        order = "" if self.order == tuple(range(len(self.order))) else f" by strides {self.order}"
        gaps = [dim for dim in self.gaps if dim not in self.repeated]
        parts = f" with gaps in {tuple(gaps)}" if gaps else ""
        return f"{order}{parts}" + (f" expanded in {self.repeated}" if self.repeated else "")


def layout_of(tensor: Tensor, batch_dim: int | None = None) -> Layout:
    """Return the layout of a tensor.

    The stride of a dimension of size 1 has no meaning for torch. In the batch dimension it counts nevertheless, so that
    one row has the same layout as several rows.
    """
    shape, strides = tensor.shape, tensor.stride()
    natural = tuple(range(len(shape)))
    if 0 in shape or strides == Layout(natural).strides(shape):
        return Layout(natural)
    if tensor.is_contiguous() and len(natural) in (4, 5):
        # Images of one channel, or one pixel, are contiguous in both memory formats; convolutions follow the strides.
        last = Layout((0, *natural[2:], 1))
        if strides == last.strides(shape):
            return last
    ordered = [dim for dim in natural if shape[dim] > 1 or dim == batch_dim]
    # Results of torch's operators are dense and in the same order.
    dense = torch.empty_like(tensor, device="meta").stride()
    order = sorted(ordered, key=lambda dim: (-(dense if shape[dim] > 1 else strides)[dim], shape[dim] == 1, dim))
    gaps, expected = [], 1
    for dim in reversed(order):
        if strides[dim] != expected:
            gaps.append(dim)
        expected = strides[dim] * shape[dim]
    for dim in natural:  # dimensions of size 1 keep their places
        if dim not in ordered:
            order.insert(dim, dim)
    return Layout(tuple(order), tuple(sorted(gaps)), tuple(dim for dim in ordered if not strides[dim]))


def has_address(tensor: Tensor) -> bool:
    """True if the tensor is memory that a graph can read."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or is_lazy(tensor))


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return a tensor's gradient without torch's warning for tensors that are no leaves."""
    return tensor.grad if tensor.is_leaf else None


def lies_at(tensor: Tensor) -> tuple[Any, ...]:
    """Return a tensor's address and geometry; transposed or negated views of the same memory differ."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg(), tensor.is_conj()
