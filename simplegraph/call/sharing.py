"""Outputs that are inputs, lie in their memory or in each other's: the caller of a replay gets them likewise."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.call.args import HostArg, TensorArg
from simplegraph.call.inputs import Slot


class _View(NamedTuple):
    """An output as a view: its index, the index of the input it lies in, and where it begins there."""

    output: int
    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SharedOutputs:
    """Hands out the outputs of a graph, where some share memory.

    Args:
        whole: the outputs as the forward returned them.
        passed: the leaves that the forward was passed.
        outputs: the real rows of the outputs.
        slots: the inputs of the real rows.
        cloned: the outputs that are graph memory and must not be handed out.

    Attributes:
        sources: the inputs that outputs are, or lie in.

    Raises:
        CannotBind: a replay cannot hand out such outputs.
    """

    def __init__(
        self,
        whole: Sequence[Any],
        passed: Sequence[Any],
        outputs: Sequence[Any],
        slots: Sequence[Slot],
        cloned: Collection[int],
    ) -> None:
        self._outputs = list(outputs)
        tensors = {index: leaf for index, leaf in enumerate(whole) if isinstance(leaf, Tensor)}
        first = {id(leaf): index for index, leaf in reversed(tensors.items())}
        self._repeated = [(index, first[id(leaf)]) for index, leaf in tensors.items() if first[id(leaf)] != index]
        places = {id(leaf): index for index, leaf in enumerate(passed) if isinstance(leaf, Tensor)}
        self._given = [(index, places[id(leaf)]) for index, leaf in tensors.items() if id(leaf) in places]
        left = tensors.keys() - dict(self._repeated).keys() - dict(self._given).keys()
        memory = {storage_key(leaf): index for index, leaf in enumerate(passed) if isinstance(leaf, Tensor)}
        inside = {index: memory[key] for index in sorted(left) if (key := storage_key(tensors[index])) in memory}
        self._views = [_view_of_input(outputs[index], index, source, slots[source]) for index, source in inside.items()]
        groups = _groups([index for index in sorted(left) if index in cloned], outputs)
        self._groups = [_group(members, outputs) for members in groups]
        self._cloned = sorted(left & set(cloned) - inside.keys() - set(itertools.chain(*groups)))
        self.sources = sorted({source for _, source in self._given} | set(inside.values()))
        self._strides = [(source, *_dense(slots[source])) for source in self.sources]

    def __bool__(self) -> bool:
        return bool(self._repeated or self._given or self._views or self._groups)

    def refusal(self, leaves: Sequence[Any]) -> CannotBind | None:
        """Return why this call's outputs cannot lie in its inputs as the captured ones did, if so.

        An input with gaps is copied into memory without, where ``contiguous`` is the input itself.
        """
        for source, shape, dense, name in self._strides:
            if not _same_strides(shape, leaves[source].stride(), dense):
                return CannotBind(Reason.ALIASED, f"an output may lie in {name}, which is not contiguous")
        return None

    def hand_out(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the outputs of the replay of a call that was passed `leaves`."""
        outputs = self._outputs.copy()
        for index in self._cloned:
            outputs[index] = outputs[index].clone()
        for memory, views in self._groups:
            own = memory.clone()
            for index, _, shape, stride, offset in views:
                outputs[index] = own.as_strided(shape, stride, offset)
        for index, source in self._given:
            outputs[index] = leaves[source]
        for index, source, shape, stride, offset in self._views:
            leaf = leaves[source]
            outputs[index] = leaf.as_strided(shape, stride, leaf.storage_offset() + offset)
        for index, before in self._repeated:
            outputs[index] = outputs[before]
        return outputs


def _view_of_input(output: Tensor, index: int, source: int, slot: Slot) -> _View:
    part: Tensor = slot.arg.leaf if isinstance(slot.arg, HostArg) else slot.view
    shape, dense, name = _dense(slot)
    if not _same_strides(shape, part.stride(), dense):
        raise CannotBind(Reason.ALIASED, f"an output is a view of {name}, padded in an inner dimension")
    if output.dtype is not part.dtype or _is_lazy(output):
        raise CannotBind(Reason.ALIASED, f"an output is a view of {name} as another dtype")
    offset = int(output.storage_offset() - part.storage_offset())
    return _View(index, source, tuple(output.shape), tuple(output.stride()), offset)


def _dense(slot: Slot) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Return an input's shape, its strides where it has no gaps, and its name; those of a copy on the CPU."""
    arg = slot.arg
    if isinstance(arg, HostArg):
        return tuple(arg.leaf.shape), tuple(arg.leaf.stride()), arg.name
    shape, stride = tuple(slot.view.shape), 1
    strides = [0] * len(shape)
    for dim in reversed(arg.order if isinstance(arg, TensorArg) else ()):
        strides[dim] = stride
        stride *= shape[dim]
    return shape, tuple(strides), arg.name


def _same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """True if strides mean the same places; that of a dimension of one row has no meaning."""
    return one == other or all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


def _groups(indices: Sequence[int], outputs: Sequence[Any]) -> list[list[int]]:
    """Group outputs that have elements of one memory in common or lie between each other's, or repeat an element."""
    found: dict[int, list[int]] = collections.defaultdict(list)
    for index in indices:
        if outputs[index].numel():
            found[outputs[index].untyped_storage().data_ptr()].append(index)
    tensors = [(members, [outputs[index] for index in members]) for members in found.values()]
    return [members for members, lying in tensors if _overlap(lying) or _interleave(lying)]


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """True if views of one memory have elements in common, as far as can be told."""
    if len(tensors) > 1:
        return not all(itertools.starmap(_apart, itertools.combinations(tensors, 2)))
    sizes = zip(tensors[0].shape, tensors[0].stride(), strict=True)
    return any(stride == 0 and size > 1 for size, stride in sizes) and not _is_lazy(tensors[0])


def _interleave(tensors: Sequence[Tensor]) -> bool:
    """True if views of one memory have gaps, as the columns of a matrix have, which others may fill."""
    plain = len({tensor.dtype for tensor in tensors}) == 1 and not any(map(_is_lazy, tensors))
    return plain and len(tensors) > 1 and any(_end(tensor) > tensor.numel() for tensor in tensors)


def _apart(one: Tensor, other: Tensor) -> bool:
    """True if two views of one memory, such as chunks of a tensor, surely have no element in common."""
    first, second = sorted((one, other), key=lambda tensor: tensor.data_ptr())
    distance = second.data_ptr() - first.data_ptr()
    if distance >= _end(first) * first.itemsize:
        return True
    if first.stride() != second.stride() or first.itemsize != second.itemsize:
        return False
    apart, room = False, None
    for stride, rows, others in sorted(zip(first.stride(), first.shape, second.shape, strict=True), reverse=True):
        if stride == 0 or rows == others == 1:
            continue
        shift, distance = divmod(distance, stride * first.itemsize)
        if room is not None and max(rows, shift + others) * stride > room:
            return False  # a row reaches into the next: their places do not tell elements apart
        apart, room = apart or shift >= rows, stride
    return apart or distance > 0


def _end(tensor: Tensor) -> int:
    """Return the number of elements from a tensor's first to its last."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1


def _is_lazy(tensor: Tensor) -> bool:
    """True if the tensor is the conjugate or the negative of what its memory holds."""
    return tensor.is_conj() or tensor.is_neg()


def _group(members: Sequence[int], outputs: Sequence[Any]) -> tuple[Tensor, list[_View]]:
    """View the memory that several outputs lie in, and say where they begin in a copy of it."""
    tensors: list[Tensor] = [outputs[index] for index in members]
    if len({tensor.dtype for tensor in tensors}) > 1 or any(map(_is_lazy, tensors)):
        raise CannotBind(Reason.ALIASED, "outputs are views of one memory as different dtypes")
    start = min(int(tensor.storage_offset()) for tensor in tensors)
    end = max(int(tensor.storage_offset()) + _end(tensor) for tensor in tensors)
    with torch.inference_mode(False), torch.no_grad():
        memory = tensors[0].as_strided((end - start,), (1,), start)
    views = [
        _View(index, -1, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()) - start)
        for index, tensor in zip(members, tensors, strict=True)
    ]
    return memory, views
