"""Arguments of calls: what a graph fixes about each, and what is known of those that torch's own modules take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.config import BatchDim, PadRule
from simplegraph.base.constants import WATCHED_BYTES, value_bytes
from simplegraph.base.nested import constant_key
from simplegraph.base.reasons import CannotBind, Reason

_LONGEST_REPR = 40

PLAIN_TENSORS = frozenset({Tensor, nn.Parameter})


@dataclasses.dataclass(frozen=True)
class TensorArg:
    """A tensor argument, by everything that a graph fixes about it.

    Attributes:
        name: its dotted name.
        shape: its sizes, with -1 in the batch dimension.
        batch_dim: the batch dimension; None for none; "reference" for one taken by address.
        order: its dimensions from largest to smallest stride, for memory formats.
        address: only of a tensor taken by address.
        pad: how padding rows are filled; pad_declared: True if that was declared.
        compared: True if the forward asks if it is the very tensor that another argument is.
    """

    name: str
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    batch_dim: BatchDim
    order: tuple[int, ...]
    pad: PadRule = "zero"
    address: int | None = None
    pad_declared: bool = False
    compared: bool = False

    def __str__(self) -> str:
        """Show dtype and shape, such as ``float32[n, 64]``, where n is the batch."""
        sizes = ", ".join("n" if size == -1 else str(size) for size in self.shape)
        order = "" if self.order == tuple(range(len(self.shape))) else f" by strides {self.order}"
        where = "" if self.address is None else f" at {self.address:#x}"
        return f"{short_repr(self.dtype)}[{sizes}]{order}{where}"


@dataclasses.dataclass(frozen=True)
class ConstantArg:
    """A non-tensor argument: `leaf` itself, and what tells it apart. `kind` keeps 1, 1.0 and True apart."""

    name: str
    kind: type
    key: Hashable
    leaf: Any = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return short_repr(self.leaf)

    def holds(self, leaf: Any) -> bool:
        """True if a leaf has the value that was captured."""
        return leaf is self.leaf or (type(leaf) is self.kind and bool(self.key == constant_key(leaf)))


@dataclasses.dataclass(frozen=True)
class HostArg(ConstantArg):
    """A small CPU tensor passed beside tensors on a GPU: what tells it apart is its value, and `leaf` is a copy."""

    def holds(self, leaf: Any) -> bool:
        """True if a leaf has the value that was captured."""
        return type(leaf) in PLAIN_TENSORS and leaf.is_cpu and self.key == _host_key(leaf)


@dataclasses.dataclass(frozen=True)
class SameArg(ConstantArg):
    """The very tensor that another argument is, named by `key`, where the forward asks for that."""

    def __str__(self) -> str:
        return f"the tensor {self.key}"

    def holds(self, leaf: Any) -> bool:
        """True; a plan compares all leaves of a call together."""
        return True


Arg = TensorArg | ConstantArg


def short_repr(value: Any) -> str:
    """Return an object's repr as a report has room for it."""
    text = " ".join(repr(value).split()).removeprefix("torch.")
    return text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 3]}..."


def batch_dim_of(arg: Arg) -> int | None:
    """Return the batch dimension of an argument; None if it has none."""
    return arg.batch_dim if isinstance(arg, TensorArg) and isinstance(arg.batch_dim, int) else None


def host_arg(name: str, tensor: Tensor) -> HostArg:
    """Take a CPU tensor among tensors on a GPU by its value."""
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(tensor).__name__} of layout {tensor.layout}")
    if tensor.nbytes > WATCHED_BYTES:
        detail = f"{name} is on the CPU and has {tensor.nbytes} bytes; up to {WATCHED_BYTES} are compared at every call"
        raise CannotBind(Reason.WRONG_DEVICE, detail)
    return HostArg(name, Tensor, _host_key(tensor), tensor.detach().clone())


def _host_key(tensor: Tensor) -> Hashable:
    return tensor.dtype, tensor.shape, value_bytes(tensor)


@dataclasses.dataclass(frozen=True)
class KnownArguments:
    """Facts about a module's arguments that need no declaration.

    Attributes:
        dims: argument name -> number of dimensions -> batch dimension; other numbers of dimensions are not known.
        pads: argument name -> how padding rows are filled.
        compared: names of arguments that the forward compares by identity: it computes otherwise if two are one.
    """

    dims: Mapping[str, Mapping[int, int | None]] = dataclasses.field(default_factory=dict)
    pads: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    compared: tuple[str, ...] = ()


NOTHING_KNOWN = KnownArguments()


def known_arguments(module: nn.Module) -> KnownArguments:
    """Return what is known of a module's arguments; nothing if its forward is not one of torch's own."""
    for kind, read in _MODULES.items():
        if isinstance(module, kind) and getattr(type(module), "forward", None) in _forwards(kind):
            return read(module)
    return NOTHING_KNOWN


def _forwards(kind: Any) -> list[Any]:
    """List the forwards of a class of torch's and of those derived from it there."""
    found = [kind, *(child for child in kind.__subclasses__() if child.__module__ == kind.__module__)]
    return [child.forward for child in found]


def _recurrent(module: Any) -> KnownArguments:
    """Know a layer's hidden states, too: (layers, batch, width), whatever `batch_first` says."""
    return KnownArguments({"input": {3: 0 if module.batch_first else 1}, "hx": {3: 1}})


def _cell(module: Any) -> KnownArguments:
    return KnownArguments({"input": {2: 0}, "hx": {2: 0}})


def _embedding_bag(module: Any) -> KnownArguments:
    """Take indices for the rows where offsets tell bags apart: bags are of the key, and have no padding.

    Padding indices would count in the last bag, but for `padding_idx`, and where their weights are zero. In a maximum
    they may count later only, when the weights have changed, so such calls run eagerly.
    """
    pads: dict[str, Any] = {"per_sample_weights": "zero"}
    if module.padding_idx is not None:
        pads["input"] = module.padding_idx
    rows: dict[int, int | None] = {1: 0, 2: 0}
    hidden = module.mode == "max" and module.padding_idx is None
    indices = {1: None, 2: 0} if hidden else rows
    return KnownArguments({"input": indices, "per_sample_weights": rows, "offsets": {1: None}}, pads)


def _attention(module: Any) -> KnownArguments:
    """Know sequences (three dimensions), masks of a batch's keys, and masks that all of a batch share."""
    first = next((child for child in module.modules() if isinstance(child, nn.MultiheadAttention)), None)
    if first is None:  # of layers that are not torch's
        return NOTHING_KNOWN
    sequences = ("query", "key", "value", "src", "tgt", "memory")
    shared = ("attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask")
    padding = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
    dims: dict[str, Mapping[int, int | None]] = {name: {3: 0 if first.batch_first else 1} for name in sequences}
    dims |= {name: {2: None} for name in shared} | {name: {2: 0} for name in padding}
    return KnownArguments(dims, compared=("query", "key", "value") if first is module else ())


_MODULES: dict[type[nn.Module], Callable[[Any], KnownArguments]] = {
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
    nn.EmbeddingBag: _embedding_bag,
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _attention,
    nn.TransformerEncoder: _attention,
    nn.TransformerDecoderLayer: _attention,
    nn.TransformerDecoder: _attention,
    nn.Transformer: _attention,
}
