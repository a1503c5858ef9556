"""The signature of a call: its leaves, their names, the batch dimension of each, and what may vary."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.config import BatchDim, CudaGraphConfig, PadRule
from simplegraph.base.errors import ConfigError, InputError, did_you_mean
from simplegraph.base.nested import ATOMS, TreeSpec, constant_key, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import memory_order
from simplegraph.call.args import (
    NOTHING_KNOWN,
    PLAIN_TENSORS,
    Arg,
    ConstantArg,
    KnownArguments,
    SameArg,
    TensorArg,
    host_arg,
)
from simplegraph.guard.torch_state import TorchSettings

_MAX_FORMS = 256  # ways of calling a module that shapes are kept of: keyword names are the caller's to choose


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """Everything about a call that a graph fixes, whichever way the arguments were passed.

    It is a part of every graph's key, and a key of its own: calls of equal `values` share one (`KnownCalls`).
    """

    args: tuple[Arg, ...]
    specs: tuple[tuple[str, TreeSpec], ...]
    context: tuple[Any, ...]

    @property
    def values(self) -> Hashable:
        return self.args, self.specs, self.context


def check_names(forward: Callable[..., Any], config: CudaGraphConfig) -> None:
    """Refuse a misspelt argument, which would be padded by another rule than its user thinks.

    Raises:
        ConfigError: a setting names an argument that `forward` does not take.
    """
    if not config.batch_dims and not config.pad_values:
        return
    parameters = inspect.signature(forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for setting in ("batch_dims", "pad_values"):
        for name in getattr(config, setting):
            if name.split(".")[0] not in names:
                hint = did_you_mean([name.split(".")[0]], names)
                takes = ", ".join(names) or "nothing"
                raise ConfigError(f"{setting} names {name!r}{hint}, but forward takes {takes}.")


class CallReader:
    """Reads calls of one module: names the leaves, finds the batch dimension, keeps what it has learnt.

    Args:
        forward: the function whose parameters name the arguments.
        config: declared batch dimensions and pad rules.
        known: what need not be declared.
        exact: find no batch dimensions, as with `exact_shapes`.

    Attributes:
        lessons: how often there was something to learn: an eager run that was observed, or a capture.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        config: CudaGraphConfig,
        known: KnownArguments = NOTHING_KNOWN,
        *,
        exact: bool = False,
    ) -> None:
        self._config, self._known = config, known
        self._exact = exact or config.exact_shapes
        self.lessons = 0
        self._pads = {**known.pads, **config.pad_values}
        self._captures_one = config.capture_sizes is None or 1 in config.capture_sizes
        check_names(forward, config)
        parameters = inspect.signature(forward).parameters.values()
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        # By the shape-free form of a call: for each leaf, the shapes it was seen with, by batch size.
        self._seen: dict[
            tuple[TreeSpec, Hashable], list[dict[int, tuple[int, ...]]]
        ] = {}  # the latest of them, oldest first

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[str], TreeSpec]:
        """Return a call's leaves, their names, and how they nest."""
        leaves, spec = flatten((args, dict(kwargs)))
        return leaves, self.names(spec), spec

    def names(self, spec: TreeSpec) -> list[str]:
        """Name the leaves of a call, no two alike: each tensor has a buffer of its own, found by its name."""
        names = [name for argument, child in self._arguments(spec) for name in child.names(argument)]
        if len(set(names)) < len(names):  # {1: x, "1": y}
            seen: set[str] = set()
            for index, name in enumerate(names):
                while name in seen:
                    name = f"{name}#{index}"
                seen.add(name)
                names[index] = name
        return names

    def _arguments(self, spec: TreeSpec) -> list[tuple[str, TreeSpec]]:
        """Name the arguments of a call, and tell how each nests."""
        positional, keyword = spec.children
        rest = (f"{self._rest}.{index}" for index in range(len(positional.children)))
        names = itertools.chain(self._positional, rest)
        return [*zip(names, positional.children), *zip(keyword.keys, keyword.children)]  # noqa: B905

    def read(
        self,
        leaves: list[Any],
        names: Sequence[str],
        spec: TreeSpec,
        context: tuple[Any, ...],
        device: torch.device | None = None,
    ) -> tuple[int, list[Arg], Signature]:
        """Find the batch size of a call, its arguments in order, and its signature.

        Without batch dimensions (`exact`) the size is 1. `device` is where the call runs if no tensor tells.

        Raises:
            CannotBind: a graph cannot serve the call.
        """
        tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        device = device_of(leaves, device)
        hosted = {index for index in tensors if leaves[index].is_cpu and device.type != "cpu"}
        tensors = [index for index in tensors if index not in hosted]
        self._check_tensors(leaves, names, tensors)
        exact = self._exact
        anchor, anchor_dim = (-1, 0) if exact else self._anchor(leaves, names, tensors)
        batch = 1 if exact else leaves[anchor].shape[anchor_dim]
        if batch == 0:
            raise CannotBind(Reason.EMPTY_BATCH, f"{names[anchor]} has shape {tuple(leaves[anchor].shape)}")
        seen = self._shapes(leaves, spec)
        args: list[Arg] = []
        for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            if index in hosted or not isinstance(leaf, Tensor):
                args.append(host_arg(name, leaf) if index in hosted else self._constant(name, leaf))
                continue
            first = next((at for at in tensors if leaves[at] is leaf and names[at] in self._known.compared), index)
            if name in self._known.compared and first < index:
                args.append(SameArg(name, Tensor, names[first], None))
                continue
            dim: BatchDim
            if exact:
                dim = "reference" if self._declared(name, leaf)[1] == "reference" else None
            else:
                dim = anchor_dim if index == anchor else self._batch_dim(name, leaf, batch, seen[index])
            args.append(self._tensor(name, leaf, dim))
        return batch, args, self._signature(args, spec, context)

    def _check_tensors(self, leaves: Sequence[Any], names: Sequence[str], tensors: Sequence[int]) -> None:
        for index in tensors:
            tensor, name = leaves[index], names[index]
            if type(tensor) not in PLAIN_TENSORS:
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.is_nested:
                kind = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}"
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} {kind}")
            first = leaves[tensors[0]].device
            if tensor.device != first:
                raise CannotBind(Reason.WRONG_DEVICE, f"{name} is on {tensor.device}, {names[tensors[0]]} on {first}")

    def _declared(self, name: str, tensor: Tensor) -> tuple[bool, BatchDim]:
        """Look up if, and as what, the batch dimension of an argument is declared; a prefix declares all below it."""
        declared = self._config.batch_dims
        for prefix in prefixes(name):
            if prefix in declared:
                return True, declared[prefix]
        known = self._known.dims.get(name.split(".")[0], {})
        return tensor.dim() in known, known.get(tensor.dim())

    def _anchor(self, leaves: Sequence[Any], names: Sequence[str], tensors: Sequence[int]) -> tuple[int, int]:
        """Find the tensor that gives the batch size: the first declared one, else the first one's dimension 0."""
        for index in tensors:
            _, dim = self._declared(names[index], leaves[index])
            if isinstance(dim, int):
                return index, _normal(dim, leaves[index], names[index])
        for index in tensors:
            if leaves[index].dim() and not self._declared(names[index], leaves[index])[0]:
                return index, 0
        raise CannotBind(Reason.AMBIGUOUS_BATCH_DIM, "no tensor argument has a batch dimension")

    def _shapes(self, leaves: Sequence[Any], spec: TreeSpec) -> list[dict[int, tuple[int, ...]]]:
        """Return the shapes that each leaf was seen with, by batch size."""
        return self._seen.get(_form(leaves, spec)) or [{}] * len(leaves)

    def learn(self, batch: int, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Remember a call that went well; a later one of another size tells dimensions apart by it."""
        form = _form(leaves, spec)
        known = self._seen[form] = self._seen.pop(form, []) or [{} for _ in leaves]
        while len(self._seen) > _MAX_FORMS:
            del self._seen[next(iter(self._seen))]
        for leaf, seen in zip(leaves, known, strict=True):
            if isinstance(leaf, Tensor) and (len(seen) < 64 or batch in seen):
                seen[batch] = tuple(leaf.shape)

    def confirmed(self, batch: int, leaves: Sequence[Any], names: Sequence[str], spec: TreeSpec) -> bool:
        """True if no batch dimension of a call is a guess: each is declared, or followed two batch sizes."""
        if self._exact:
            return True
        triples = zip(leaves, names, self._shapes(leaves, spec), strict=True)
        tensors = ((leaf, name, seen) for leaf, name, seen in triples if isinstance(leaf, Tensor))
        guesses = [seen for leaf, name, seen in tensors if not self._declared(name, leaf)[0]]
        return all(any(rows != batch for rows in seen) for seen in guesses)

    def _batch_dim(self, name: str, tensor: Tensor, batch: int, seen: dict[int, tuple[int, ...]]) -> BatchDim:
        declared, dim = self._declared(name, tensor)
        if declared:
            if isinstance(dim, int):
                dim = _normal(dim, tensor, name)
                if tensor.shape[dim] != batch:
                    raise CannotBind(Reason.BATCH_MISMATCH, f"{name} has {tensor.shape[dim]} rows, the batch {batch}")
            return dim
        shape = tuple(tensor.shape)
        candidates = {
            dim
            for dim, size in enumerate(shape)
            if size == batch and all(dim < len(then) and then[dim] == rows for rows, then in seen.items())
        }
        if batch == 1 and 0 in candidates and self._captures_one:
            return 0  # the other dimensions of 1 are broadcast ones, and at size 1 nothing is padded anyway
        if len(candidates) > 1:
            raise CannotBind(
                Reason.AMBIGUOUS_BATCH_DIM, f"{name} has shape {shape}, more than one dimension of {batch}"
            )
        if candidates:
            return candidates.pop()
        if any(then != shape for then in seen.values()):
            raise CannotBind(Reason.BATCH_MISMATCH, f"{name} has shape {shape}, the batch is {batch}")
        return None

    def _tensor(self, name: str, tensor: Tensor, batch_dim: BatchDim) -> TensorArg:
        shape = tuple(-1 if dim == batch_dim else size for dim, size in enumerate(tensor.shape))
        rules = self._pads
        declared = next((prefix for prefix in prefixes(name) if prefix in rules), None)
        pad: PadRule = "zero" if declared is None else rules[declared]
        address = tensor.data_ptr() if batch_dim == "reference" else None
        return TensorArg(
            name,
            tensor.dtype,
            tensor.device,
            shape,
            batch_dim,
            memory_order(tensor),
            pad,
            address,
            declared is not None,
            name in self._known.compared,
        )

    def _constant(self, name: str, value: Any) -> ConstantArg:
        kind: type[Any] = type(value)
        if dataclasses.is_dataclass(value) and not _is_frozen(kind):  # type: ignore[arg-type]
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {kind.__name__} with more than its fields")
        if kind is not slice and _is_unhashable(value):
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {kind.__name__}; a tensor or a tuple is compared")
        if not isinstance(value, ATOMS) and not inspect.isroutine(value) and not _is_frozen(kind):  # type: ignore[arg-type]
            hint = "; graph_generation serves generate()" if name.startswith(("past_key_values", "cache")) else ""
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {kind.__name__}{hint}")
        return ConstantArg(name, kind, constant_key(value), value)

    def _signature(self, args: list[Arg], spec: TreeSpec, context: tuple[Any, ...]) -> Signature:
        known = self._defaults
        constants = [arg for arg in args if type(arg) is ConstantArg]  # a default on the CPU may be written to
        left_out = {arg.name for arg in constants if arg.name in known and arg.holds(known[arg.name])}
        kept = sorted((arg for arg in args if arg.name not in left_out), key=lambda arg: arg.name)
        named = sorted((pair for pair in self._arguments(spec) if pair[0] not in left_out), key=lambda pair: pair[0])
        return Signature(tuple(kept), tuple(named), context)


def device_of(leaves: Sequence[Any], default: torch.device | None = None) -> torch.device:
    """Return the device of a call: the first tensor's that is not on the CPU, or else the CPU.

    Raises:
        CannotBind: no leaf is a tensor, and there is no default.
    """
    devices = [leaf.device for leaf in leaves if isinstance(leaf, Tensor)]
    if default is not None:
        devices.insert(0, default)
    if not devices:
        raise CannotBind(Reason.AMBIGUOUS_BATCH_DIM, "no argument is a tensor; exact_shapes=True needs none")
    return next((device for device in devices if device.type != "cpu"), devices[0])


def differences(then: Signature, now: Signature) -> list[str]:
    """Say in which arguments and surroundings two signatures differ."""
    before, after = ({arg.name: str(arg) for arg in each.args} for each in (then, now))
    pairs = [(name, before.get(name, "absent"), after.get(name, "absent")) for name in before | after]
    found = [f"{name}: {one} became {other}" for name, one, other in pairs if one != other]
    if then.specs != now.specs and not found:
        found.append("how the arguments nest")
    kinds = zip(("autocast", "state", "settings", "default devices"), then.context, now.context, strict=False)
    for kind, one, other in kinds:
        if one != other:
            told = one.difference(other) if isinstance(one, TorchSettings) else f"{one} became {other}"
            found.append(f"{kind}: {told}")
    return found or ["arguments that look alike, by address or rule of padding"]


def prefixes(name: str) -> Iterator[str]:
    """Yield the names that declare an argument: ``states.0.x``, ``states.0``, ``states``."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _normal(dim: int, tensor: Tensor, name: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"batch_dims[{name!r}] is {dim}, but {name} has shape {tuple(tensor.shape)}; "
            f"expected a dimension from {-tensor.dim()} to {tensor.dim() - 1}."
        )
    return dim % tensor.dim()


def _form(leaves: Sequence[Any], spec: TreeSpec) -> tuple[TreeSpec, Hashable]:
    """Describe a call without its shapes."""
    return spec, tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


def _is_unhashable(value: Any) -> bool:
    """True for NumPy arrays, sets, bytearrays, and values that hold such."""
    try:
        hash(value)
    except Exception:  # of the user's class
        return True
    return False


@functools.lru_cache(maxsize=1024)
def _is_frozen(kind: Hashable) -> bool:
    """True if a type compares by value: defining equality and a hash promises that both stay."""
    return all(getattr(kind, name) is not getattr(object, name) for name in ("__hash__", "__eq__"))
