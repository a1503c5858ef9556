"""Static inputs: the memory that graphs read, and how a call's arguments get into it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.graph.tensors import storage_key
from simplegraph.module.signature import Arg, ConstantArg, TensorArg
from simplegraph.nested import constant_key

# Static inputs are made for the largest size at once, so that all sizes share them, unless that would
# take more than this; then a size gets its own when it is captured.
_SHARED_LIMIT_BYTES = 64 << 20


class StaticInput:
    """The static buffer of one tensor argument, and its views by batch size.

    With the batch in dimension 0 the views of all sizes are the first rows of one buffer. Otherwise
    every padded size lays its elements out contiguously from the buffer's start, as eager would have
    them, and rows of different sizes overlap.
    """

    def __init__(self, arg: TensorArg, rows: int, like: Tensor) -> None:
        self.arg = arg
        self.rows = rows
        self.pad = arg.pad
        self._reference = like if arg.batch_dim == "reference" else None
        # Not an inference tensor, whatever mode the caller is in: those refuse writes from other modes.
        with torch.inference_mode(False), torch.no_grad():
            self._buffer = self._allocate(self._shape(rows))
            self.pad_value = torch.full((), self.pad_number, dtype=arg.dtype, device=arg.device)
        # Views are made once per size; slicing anew would cost as much as a replay.
        self.view = functools.lru_cache(maxsize=None)(self._view)
        self.part = functools.lru_cache(maxsize=8192)(self._part)

    @property
    def batched(self) -> bool:
        return isinstance(self.arg.batch_dim, int)

    @property
    def rows_first(self) -> bool:
        """Whether the views of all sizes are the first rows of one buffer."""
        return self.arg.batch_dim == 0 and self.arg.order[:1] in ((), (0,))

    def _shape(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if size == -1 else size for size in self.arg.shape)

    def _allocate(self, shape: tuple[int, ...]) -> Tensor:
        if self._reference is not None:
            return self._reference
        buffer = torch.empty(torch.Size(shape).numel(), dtype=self.arg.dtype, device=self.arg.device)
        return buffer.fill_(self.pad_number)

    @property
    def pads_with_number(self) -> bool:
        """Whether padding rows hold one number, whatever the real rows are."""
        return self.batched and self.pad not in ("keep", "repeat-last")

    @property
    def pad_number(self) -> int | float | bool:
        return self.pad if not isinstance(self.pad, str) else 0

    def _view(self, padded: int) -> Tensor:
        """The whole input of a captured size, padding rows included."""
        if self._reference is not None:
            return self._reference
        shape = self._shape(padded)
        ordered = [shape[dim] for dim in self.arg.order]
        places = [self.arg.order.index(dim) for dim in range(len(shape))]
        with torch.inference_mode(False), torch.no_grad():
            flat = self._buffer[: torch.Size(shape).numel()]
            return flat.view(ordered).permute(places)

    def _part(self, padded: int, start: int, end: int) -> Tensor:
        """Rows `start` to `end` of the input of a captured size."""
        view = self.view(padded)
        if not isinstance(self.arg.batch_dim, int):
            return view
        with torch.inference_mode(False), torch.no_grad():
            return view.narrow(self.arg.batch_dim, start, end - start)

    def fill(self, padded: int, start: int, end: int) -> None:
        """Set padding rows by the argument's rule; `start` is the number of real rows."""
        if self.pad == "keep" or not self.batched or start >= end:
            return
        tail = self.part(padded, start, end)
        if self.pad == "repeat-last":
            tail.copy_(self.part(padded, start - 1, start).expand_as(tail))
        else:
            tail.fill_(self.pad_number)


class InputSet:
    """The static inputs of one signature, for sizes up to `rows`.

    Attributes:
        dirty: rows from here on hold their padding values (inputs with the batch first, only).
        handed_out: a caller holds views of the buffers, so what they contain is unknown.
    """

    def __init__(self, args: Sequence[Arg], rows: int, leaves: Sequence[Any]) -> None:
        self.rows = rows
        self.dirty = 0
        self.handed_out = False
        self.inputs: dict[str, StaticInput] = {
            arg.name: StaticInput(arg, rows, leaf)
            for arg, leaf in zip(args, leaves, strict=True)
            if isinstance(arg, TensorArg)
        }
        storages = [item.view(rows).untyped_storage() for item in self.inputs.values() if item._reference is None]
        self._ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]

    def leaves(self, args: Sequence[Arg], padded: int) -> list[Any]:
        """What the forward of a captured size is passed: views of the buffers, and constants as they were."""
        return [arg.leaf if isinstance(arg, ConstantArg) else self.inputs[arg.name].view(padded) for arg in args]

    def load(self, tensors: Iterable[tuple[str, Tensor]], batch: int, padded: int) -> None:
        """Copy a call's tensors in, given by name, and set the padding rows."""
        names, sources = zip(*tensors, strict=True)
        for name, source in zip(names, self.detached(sources), strict=True):
            static = self.inputs[name]
            part = static.part(padded, 0, batch)
            if part.data_ptr() != source.data_ptr():  # equal for what is passed by reference
                part.copy_(source)
            static.fill(padded, batch, padded)
        self.dirty = self.rows  # rows above this size were not looked at

    def tile(self, tensors: Iterable[tuple[str, Tensor]], batch: int, padded: int) -> None:
        """Fill a size with the rows of examples over and over: real values, valid as indices."""
        for name, source in tensors:
            static = self.inputs[name]
            dim = static.arg.batch_dim
            if isinstance(dim, int):
                rows = torch.arange(padded, device=source.device) % batch
                static.view(padded).copy_(source.index_select(dim, rows))
            elif dim is None:
                static.view(padded).copy_(source)
        self.dirty = self.rows

    def clean(self, start: int) -> None:
        """Let all rows from `start` on hold their padding values; where rows of sizes overlap, that has no meaning."""
        for static in self.inputs.values():
            if static.rows_first and static.pads_with_number:
                static.fill(self.rows, start, self.dirty)
        self.dirty = start

    def detached(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """The sources, copied where they lie in these buffers: one copied in would overwrite another, still to come."""
        return [source.clone() if self._hold(source.data_ptr()) else source for source in sources]

    def _hold(self, address: int) -> bool:
        return any(start <= address < end for start, end in self._ranges)

    @property
    def memory(self) -> dict[str, int]:
        """The storage keys of all inputs, by name."""
        return {name: storage_key(item.view(self.rows)) for name, item in self.inputs.items()}

    @property
    def storages(self) -> set[int]:
        """Keys of the memory that belongs to the buffers themselves."""
        return {key for name, key in self.memory.items() if self.inputs[name]._reference is None}


def overlap(tensors: Iterable[Tensor]) -> bool:
    """Whether any two tensors share memory, or might: what lies between the first and last element counts as theirs."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(start < end for (_, end), (start, _) in itertools.pairwise(spans))


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def shared_rows(args: Sequence[Arg], largest: int, padded: int) -> int:
    """How many rows the static inputs get: the largest size's, or, where that is much memory, this one's."""
    row_bytes = sum(
        arg.dtype.itemsize * abs(torch.Size(arg.shape).numel())
        for arg in args
        if isinstance(arg, TensorArg) and isinstance(arg.batch_dim, int)
    )
    return max(largest, padded) if row_bytes * largest <= _SHARED_LIMIT_BYTES else padded


class Slot:
    """One argument of a plan: what a call must bring, and where it goes."""

    def __init__(self, arg: Arg, static: StaticInput | None, padded: int, rows: int) -> None:
        self.view: Tensor | None = None
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.stride: tuple[int, ...] = ()
        self.device_index = -1
        self.address = self.end = 0
        self.reference = False
        self.constant: ConstantArg | None = None
        if isinstance(arg, ConstantArg):
            self.constant = arg
        elif static is not None:
            self.view = static.part(padded, 0, rows)
            self.shape, self.dtype, self.stride = self.view.shape, arg.dtype, self.view.stride()
            self.device_index = -1 if arg.device.type == "cpu" else arg.device.index
            self.address = self.view.data_ptr()
            self.end = self.address + max(1, static.view(padded).untyped_storage().nbytes())
            self.reference = arg.batch_dim == "reference"

    def holds(self, leaf: Any) -> bool:
        """Whether a non-tensor leaf has the value that was captured."""
        constant = self.constant
        if constant is None or leaf is constant.leaf:
            return constant is not None
        return type(leaf) is constant.kind and bool(constant.key == constant_key(leaf))
