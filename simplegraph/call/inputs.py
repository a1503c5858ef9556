"""Arguments of calls, with all properties that a graph fixes, and the static inputs that graphs read."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.config import BatchDim, PadRule
from simplegraph.base.constants import value_bytes
from simplegraph.base.extras import static_memory
from simplegraph.base.modes import outside_modes
from simplegraph.base.nested import constant_key
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import Layout, storage_key
from simplegraph.program.host_arguments import HostArguments

_LONGEST_REPR = 40

PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})


@dataclasses.dataclass(frozen=True)
class TensorArg:
    """A tensor argument, with all properties that a graph fixes.

    Attributes:
        name: its dotted name.
        shape: its sizes, with -1 in the batch dimension.
        batch_dim: the batch dimension; None without one; "reference" for a tensor that is read in place.
        layout: the layout of its elements.
        pad: the declared rule for padding rows; None if none is declared: then they are zeros.
        address: the address of a tensor that is read in place; else None.
        kind: its class.
        alias: how it shares another argument's memory, although it has a static input of its own; else empty.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    batch_dim: BatchDim
    layout: Layout
    pad: PadRule | None = None
    address: int | None = None
    kind: type = Tensor
    alias: str = ""

    def __str__(self) -> str:
        """Show dtype and shape, such as ``float32[n, 64]``, where n is the batch."""
        sizes = ", ".join("n" if size == -1 else str(size) for size in self.shape)
        where = "" if self.address is None else f" at {self.address:#x}"
        kind = "" if self.kind is Tensor else f" as a {self.kind.__name__}"
        return f"{short_repr(self.dtype)}[{sizes}]{self.layout}{where}{kind}{self.alias}"


@dataclasses.dataclass(frozen=True)
class HostInput(TensorArg):
    """A CPU tensor that the forward moves to the graph's device; `device` and the static input are the graph's."""

    def __str__(self) -> str:
        return f"{super().__str__()} from the CPU"


@dataclasses.dataclass(frozen=True)
class ConstantArg:
    """A constant argument, which is compared by class and key; the class distinguishes 1, 1.0 and True."""

    name: str
    kind: type
    key: Hashable
    leaf: Any = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return short_repr(self.leaf)

    def holds(self, leaf: Any) -> bool:
        """True if a leaf has the value that was captured."""
        if leaf is self.leaf or type(leaf) is not self.kind:
            return leaf is self.leaf
        try:
            return bool(self.key == constant_key(leaf))
        except Exception:  # a user's class may refuse to be compared
            return False


@dataclasses.dataclass(frozen=True)
class HostArg(ConstantArg):
    """A small CPU tensor that the forward reads on the CPU: it is compared by value, and `leaf` is a copy of it."""

    def holds(self, leaf: Any) -> bool:
        """True if a leaf has the value that was captured."""
        return type(leaf) in PLAIN_TENSORS and leaf.is_cpu and self.key == _host_key(leaf)


@dataclasses.dataclass(frozen=True)
class SameArg(ConstantArg):
    """An argument that is the same tensor as another argument, whose name is `key`."""

    def __str__(self) -> str:
        return f"the tensor {self.key}"

    def holds(self, leaf: Any) -> bool:
        """True if a leaf is a tensor; a plan compares the identities of all tensors of a call together."""
        return type(leaf) in PLAIN_TENSORS and leaf.layout is torch.strided and not leaf.is_nested


Arg = TensorArg | ConstantArg


def short_repr(value: Any) -> str:
    """Return an object's repr, shortened for a report; the name of its class if it has none."""
    try:
        text = " ".join(repr(value).split()).removeprefix("torch.")
    except Exception:  # a user's own, or that of a very long number
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def batch_dim_of(arg: Arg) -> int | None:
    """Return the batch dimension of an argument; None if it has none."""
    return arg.batch_dim if isinstance(arg, TensorArg) and isinstance(arg.batch_dim, int) else None


def host_arg(name: str, tensor: Tensor) -> HostArg:
    """Make the argument of a CPU tensor that is compared by value."""
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(tensor).__name__} of layout {tensor.layout}")
    return HostArg(name, Tensor, _host_key(tensor), tensor.detach().clone())


def _host_key(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, value_bytes(tensor)


# Static inputs are made for the largest size, and all sizes share them. If they would take more bytes than this, each
# size gets static inputs of its own when it is captured.
_SHARED_LIMIT_BYTES = 64 << 20
_GAP_BYTES = 64  # the gaps between rows of static inputs, if the caller's tensors have gaps of any size
_MAX_VIEWS = 8192  # the most views that are kept


class StaticInput:
    """The static buffer of one tensor argument, and its views by batch size.

    With the batch in dimension 0, the views of all sizes are the first rows of one buffer. Otherwise the elements of
    every padded size are contiguous from the start of the buffer, as in eager, and rows of different sizes overlap.

    The static input of a `HostInput` also has a buffer on the CPU, which the forward is passed.

    Attributes:
        batched: True if it has a batch dimension; rows_first: True if the views of all sizes are the first rows of one
            buffer.
        pads_with_number: True if padding rows hold one number, whatever the real rows are; pad_number: the number.
        buffer: its memory, as one dimension; host: the buffer on the CPU; None unless it is a `HostInput`.
    """

    def __init__(self, arg: TensorArg, rows: int, like: Tensor) -> None:
        self.arg, self.pad = arg, "zero" if arg.pad is None else arg.pad
        self.batched = isinstance(arg.batch_dim, int)
        self.rows_first = arg.batch_dim == 0 and arg.layout.order[:1] in ((), (0,))
        self.pads_with_number = self.batched and self.pad not in ("keep", "repeat-last")
        self.pad_number: int | float | bool = self.pad if not isinstance(self.pad, str) else 0
        self._reference = like if arg.batch_dim == "reference" else None
        # Never an inference tensor, whatever mode the caller is in: these refuse writes from other modes.
        with torch.inference_mode(False), torch.no_grad():
            shape = [rows if size == -1 else size for size in arg.shape]
            count = extent(shape, self._strides(shape)) if self._reference is None else 0
            self.buffer = torch.full((count,), self.pad_number, dtype=arg.dtype, device=arg.device)
            from_host = isinstance(arg, HostInput)
            self.host = torch.full_like(self.buffer, self.pad_number, device="cpu") if from_host else None
            self.pad_value = torch.full((), self.pad_number, dtype=arg.dtype, device=arg.device)
        # Views are made once for each size, since slicing costs as much as a replay. `lru_cache` would make a reference
        # cycle, and keep large buffers until a garbage collection.
        self._views: dict[tuple[int, int, int], Tensor] = {}
        self._passed: dict[tuple[int, int], Tensor] = {}

    def _strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        # With this gap, rows are as well aligned as without gaps.
        return self.arg.layout.strides(shape, _GAP_BYTES // self.arg.dtype.itemsize)

    def view(self, padded: int) -> Tensor:
        """Return a view of all rows of a captured size, padding rows included."""
        return self.part(padded, 0, padded)

    def part(self, padded: int, start: int, end: int) -> Tensor:
        """Return a view of rows `start` to `end` of a captured size."""
        if self._reference is not None:
            return self._reference
        key = (padded, start, end) if self.batched else (0, 0, 0)
        if key not in self._views:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            shape = [padded if size == -1 else size for size in self.arg.shape]
            with torch.inference_mode(False), torch.no_grad():
                whole = self.buffer.as_strided(shape, self._strides(shape))
                dim = batch_dim_of(self.arg)
                self._views[key] = whole if dim is None else whole.narrow(dim, start, end - start)
        return self._views[key]

    def passed(self, padded: int, end: int) -> Tensor:
        """Return a view of the first rows of the tensor that the forward is passed, in the class of the argument."""
        part = self.part(padded, 0, end)
        if self.host is None and self.arg.kind is Tensor:
            return part
        if (padded, end) not in self._passed:
            with torch.inference_mode(False), torch.no_grad():
                like = part.shape, part.stride(), part.storage_offset()
                self._passed[padded, end] = self._typed(part if self.host is None else self.host.as_strided(*like))
        return self._passed[padded, end]

    def _typed(self, tensor: Tensor) -> Tensor:
        return tensor if self.arg.kind is Tensor else nn.Parameter(tensor, requires_grad=False)

    def fill_host(self, tensor: Tensor, padded: int) -> None:
        """Copy a call's tensor to the CPU buffer that the forward is passed, and set the padding rows."""
        whole, dim = self.passed(padded, padded), batch_dim_of(self.arg)
        with torch.inference_mode(False), torch.no_grad():
            if dim is None:
                whole.copy_(tensor)
                return
            rows = tensor.shape[dim]
            whole.narrow(dim, 0, rows).copy_(tensor)
            tail = whole.narrow(dim, rows, padded - rows)
            tail.copy_(tensor.narrow(dim, rows - 1, 1)) if self.pad == "repeat-last" else tail.fill_(self.pad_number)

    def copied_part(self, padded: int, end: int, *, reference: bool = False) -> Tensor:
        """Return a copy of the first rows of a captured size, on the device that the forward expects.

        A tensor that is read in place is returned itself, unless `reference` is True.
        """
        if self._reference is not None and not reference:
            return self._reference
        part, like = self.part(padded, 0, end), self.view(end)
        device = part.device if self.host is None else "cpu"
        made = torch.empty_strided(like.shape, like.stride(), dtype=part.dtype, device=device)
        return self._typed(made.copy_(part))

    def repeat(self, rows: int, padded: int) -> None:
        """Fill the padding rows by repeating the real rows: these values are valid, and differ from row to row."""
        if isinstance(self.arg.batch_dim, int) and padded > rows:
            real = self.part(padded, 0, rows)
            self.part(padded, rows, padded).copy_(_over_and_over(real, self.arg.batch_dim, padded - rows))


def _over_and_over(tensor: Tensor, dim: int, count: int, first: int = 0) -> Tensor:
    """Return `count` rows of a tensor, repeated cyclically from the row `first`."""
    # Indices are computed on the CPU: on a GPU, the first use of each operator loads a kernel.
    rows = torch.arange(first, first + count, device="cpu") % tensor.shape[dim]
    return tensor.index_select(dim, rows.to(tensor.device))


class InputSet:
    """The static inputs of one signature.

    Args:
        args: the arguments of its calls.
        capacity: the most rows of a size that uses them.
        leaves: of one such call.

    Attributes:
        inputs: the static input of each argument, by name.
        hosted: those of arguments that a forward is passed on the CPU.
        dirty: rows from this index on hold their padding values (only inputs with the batch dimension first).
        handed_out: True if a caller has views of the buffers, so that their contents are unknown.
        buffer_spans: the addresses of the buffers.
        storages: storage keys of the buffers, also of those on the CPU.
    """

    def __init__(self, args: Sequence[Arg], capacity: int, leaves: Sequence[Any]) -> None:
        self.capacity = capacity
        self.dirty, self.handed_out = 0, False
        with static_memory(args):
            self.inputs: dict[str, StaticInput] = {
                arg.name: StaticInput(arg, capacity, leaf)
                for arg, leaf in zip(args, leaves, strict=True)
                if isinstance(arg, TensorArg)
            }
        views = [item.view(capacity) for item in self.inputs.values() if item._reference is None]
        self.hosted = [item for item in self.inputs.values() if item.host is not None]
        passed = [item.passed(capacity, capacity) for item in self.hosted]
        self.buffer_spans, self.storages = Spans(views), set(map(storage_key, (*views, *passed)))

    def load_hosts(self, padded: int) -> None:
        """Fill the CPU buffers of a size, for an eager run on the static inputs."""
        with outside_modes():  # hidden from observers, which would take the copies for writes of the forward
            for static in self.hosted:
                static.passed(padded, padded).copy_(static.view(padded))

    def host_arguments(self, args: Sequence[Arg], *, shows_python: bool) -> HostArguments:
        """Return the CPU tensors that the forward is passed, with the static inputs that graphs read in their place."""
        arguments = HostArguments(shows_python=shows_python)
        for arg in args:
            if isinstance(arg, HostArg):
                arguments.add(arg.name, arg.leaf, by_value=True)
        for static in self.hosted:
            arguments.add(static.arg.name, static.passed(self.capacity, self.capacity), static.buffer)
        return arguments

    def leaves(self, args: Sequence[Arg], padded: int) -> list[Any]:
        """Return the leaves that a captured forward is passed: views of the buffers, and constants."""
        return self.passed(args, lambda static: static.passed(padded, padded))

    def passed(self, args: Sequence[Arg], view: Callable[[StaticInput], Tensor]) -> list[Any]:
        """Return the leaves that a forward is passed: `view` of each static input, and constants."""
        given: dict[str, Any] = {arg.name: arg.leaf for arg in args if isinstance(arg, ConstantArg)}
        given |= {name: view(static) for name, static in self.inputs.items()}
        return [given[str(arg.key) if isinstance(arg, SameArg) else arg.name] for arg in args]

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]], padded: int, first: int = 0) -> None:
        """Fill a size by repeating a call's rows, starting at row `first`: real values are valid as indices."""
        given = dict(tensors)
        for name, source in zip(given, self.detached([*given.values()]), strict=True):
            static = self.inputs[name]
            dim = static.arg.batch_dim
            if isinstance(dim, int):
                static.view(padded).copy_(_over_and_over(source, dim, padded, first))
            elif dim is None:
                static.view(padded).copy_(source)
        if self.hosted:
            self.load_hosts(padded)
        self.forget_padding()  # the contents of rows above this size are unknown

    def forget_padding(self) -> None:
        """Note that no row is known to hold its padding value, since any row may have been written."""
        self.dirty = self.capacity

    def clean(self, start: int) -> None:
        """Set all rows from `start` on to their padding values, in inputs with the batch dimension first."""
        for static in self.inputs.values():
            if static.rows_first and static.pads_with_number and start < self.dirty:
                static.part(self.capacity, start, self.dirty).fill_(static.pad_number)
        self.dirty = start

    def detached(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Clone the sources that are in these buffers: the copy of another source could overwrite them."""
        return [source.clone() if self.buffer_spans.contains(source.data_ptr()) else source for source in sources]

    @property
    def memory(self) -> dict[str, int]:
        """The storage keys of the tensors that a forward is passed, by name."""
        hosts = {item.arg.name: storage_key(item.passed(self.capacity, self.capacity)) for item in self.hosted}
        return {name: storage_key(item.view(self.capacity)) for name, item in self.inputs.items()} | hosts


def aliases(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return, for each tensor, the index of the first same tensor, and of the first that begins at its address."""
    objects: dict[int, int] = {}
    starts: dict[int, int] = {0: -1}  # all empty tensors have the address 0
    return [
        (objects.setdefault(id(tensor), at), starts.setdefault(tensor.data_ptr(), at))
        for at, tensor in enumerate(tensors)
    ]


def aliasable(args: Sequence[Arg]) -> list[int]:
    """List the indices of the arguments whose `aliases` are part of the key: tensors not compared by value."""
    return [index for index, arg in enumerate(args) if isinstance(arg, (TensorArg, SameArg))]


def overlap(tensors: Iterable[Tensor]) -> bool:
    """True if two tensors may share memory, counting all memory between a tensor's first and last element."""
    spans = sorted(_span(tensor) for tensor in tensors if tensor.numel())
    return any(start < end for (_, end), (start, _) in itertools.pairwise(spans))


def overlaps_itself(tensor: Tensor) -> bool:
    """True if elements of a tensor may share memory, as after `expand`, so that nothing can be copied to it."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(dim for dim in zip(tensor.stride(), tensor.shape, strict=True) if dim[1] > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + extent(tensor.shape, tensor.stride()) * tensor.itemsize


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements between a tensor's first and its last element, both included."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return last + 1 if 0 not in shape else 0


class Spans:
    """The address ranges of tensors' storages."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
        ranges = sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})
        self._starts = [start for start, _ in ranges]
        self._ends = [start + size for start, size in ranges]

    def __len__(self) -> int:
        return len(self._starts)

    def contains(self, address: int) -> bool:
        """True if an address is in one of the ranges."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._ends[at]


def shared_rows(args: Sequence[Arg], largest: int, padded: int) -> int:
    """Return the number of rows of static inputs: the largest size, or this size if that takes too much memory."""
    batched = [arg for arg in args if isinstance(arg, TensorArg) and batch_dim_of(arg) is not None]
    row_bytes = sum(arg.dtype.itemsize * abs(torch.Size(arg.shape).numel()) for arg in batched)
    return max(largest, padded) if row_bytes * largest <= _SHARED_LIMIT_BYTES else padded


class Slot(NamedTuple):
    """One argument of a plan: the expected leaf, and the view that it is copied to.

    Attributes:
        view: the view that a tensor is copied to; for a constant its `arg`, which no call passes.
        shape: the tensor's shape; None for a constant, which has no address either.
        address: the address of the static input.
        reference: True for a tensor that is read in place and never copied.
        kind: its class.
        strides: other strides that are known to have its layout.
    """

    view: Any
    arg: Arg
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    device_index: int = -1
    address: int = 0
    stride: tuple[int, ...] = ()
    reference: bool = False
    kind: type = Tensor
    strides: Collection[tuple[int, ...]] = ()

    def is_filled_by(self, leaf: Tensor) -> bool:
        """True if a call's tensor is the static input itself, which the caller wrote in place."""
        return leaf.data_ptr() == self.address and leaf.stride() == self.stride


def slot(arg: Arg, inputs: InputSet, padded: int, rows: int) -> Slot:
    """Make the slot of an argument in a plan for `rows` real rows of `padded`."""
    if isinstance(arg, ConstantArg):
        return Slot(arg, arg)
    static = inputs.inputs[arg.name]
    view = static.part(padded, 0, rows)
    on_cpu = arg.device.type == "cpu" or isinstance(arg, HostInput)
    address, index = view.data_ptr(), -1 if on_cpu else arg.device.index
    reference = arg.batch_dim == "reference"
    if arg.kind is not Tensor and not reference:
        view = view.detach()  # a call that passes this static input passes no parameter
    stride = view.stride()
    return Slot(view, arg, view.shape, arg.dtype, index, address, stride, reference, arg.kind, {stride})
