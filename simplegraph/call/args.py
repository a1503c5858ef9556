"""Describe an argument of a call by all that a graph fixes about it: a tensor, a constant, a small CPU tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
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
