"""The signature of a call: its leaves, their names, the batch dimension of each, and what may vary."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.config import BatchDim, CudaGraphConfig, PadRule
from simplegraph.base.constants import WATCHED_BYTES
from simplegraph.base.errors import ConfigError, InputError, did_you_mean
from simplegraph.base.nested import ATOMS, TreeSpec, constant_key, flatten
from simplegraph.base.objects import class_member
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import layout_of
from simplegraph.call.inputs import (
    PLAIN_TENSORS,
    Arg,
    ConstantArg,
    HostInput,
    SameArg,
    TensorArg,
    aliases,
    host_arg,
)
from simplegraph.guard.torch_state import TorchSettings
from simplegraph.guard.values import PlainValues
from simplegraph.program.host_modes import HostArguments, used_on_cpu

_ROUTINES: tuple[type, ...] = types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType
_ROUTINES += types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType
_MAX_FORMS = 256  # ways of calling a module that shapes are kept of: keyword names are the caller's to choose
_MAX_HOSTS = 4096  # names of CPU tensors


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
    if not (config.batch_dims or config.pad_values or config.length_dims):
        return
    parameters = inspect.signature(forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = [p.name for p in parameters]
    for setting in ("batch_dims", "pad_values", "length_dims"):
        for name in getattr(config, setting):
            if name.split(".")[0] not in names and not name.startswith("self."):  # those are left in attributes
                hint = did_you_mean([name.split(".")[0]], names)
                takes = ", ".join(names) or "nothing"
                raise ConfigError(f"{setting} names {name!r}{hint}, but forward takes {takes}.")


@dataclasses.dataclass(frozen=True)
class KnownArguments:
    """Facts about a module's arguments that need no declaration.

    Attributes:
        dims: argument name -> number of dimensions -> batch dimension; other numbers of dimensions are not known.
        pads: argument name -> how padding rows are filled.
    """

    dims: Mapping[str, Mapping[int, int | None]] = dataclasses.field(default_factory=dict)
    pads: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    return KnownArguments(dims)


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


class CallReader:
    """Reads calls of one module: names the leaves, finds the batch dimension, keeps what it has learnt.

    Args:
        forward: the function whose parameters name the arguments.
        config: declared batch dimensions and pad rules.
        known: what need not be declared.

    Attributes:
        lessons: how often there was something to learn: an eager run that was observed, or a capture.
        hosts: by the name of a CPU tensor that is passed to a forward on another device, where it is used on the CPU;
            an empty text if it is only moved.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        config: CudaGraphConfig,
        known: KnownArguments = NOTHING_KNOWN,
    ) -> None:
        self._config, self._known = config, known
        self._exact = config.exact_shapes
        self.lessons = 0
        self.hosts: dict[str, str] = {}
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
        """Name the leaves of a call."""
        return [name for argument, child in self._arguments(spec) for name in child.names(argument)]

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

        Without batch dimensions (`exact_shapes`) the size is 1. `device` is where the call runs if no tensor tells.

        Raises:
            CannotBind: a graph cannot serve the call.
        """
        if len(set(names)) < len(names):  # of {1: x, "1": y}, and each static input is found by its name
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"two arguments are called {twice}; rename one")
        tensors = [index for index, leaf in enumerate(leaves) if issubclass(type(leaf), Tensor)]
        device = device_of(leaves, device)
        hosted = {index for index in tensors if leaves[index].is_cpu and device.type != "cpu"}
        self._check_tensors(leaves, names, tensors, hosted)  # before anything is asked that only some tensors know
        beside = len(hosted) < len(tensors)
        by_value = {index for index in hosted if self._is_told_by_value(names[index], leaves[index], beside=beside)}
        tensors = [index for index in tensors if index not in by_value]
        exact = self._exact
        anchor, anchor_dim = (-1, 0) if exact else self.anchor(leaves, names, tensors)
        batch = 1 if exact else leaves[anchor].shape[anchor_dim]
        if batch == 0:
            raise CannotBind(Reason.EMPTY_BATCH, f"{names[anchor]} has shape {tuple(leaves[anchor].shape)}")
        seen = self._shapes(leaves, spec)
        shared = self._aliases({names[index]: leaves[index] for index in tensors})
        leads = spec.leads_with_batch()
        args: list[Arg] = []
        for index, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            if index in by_value or not issubclass(type(leaf), Tensor):
                args.append(host_arg(name, leaf) if index in by_value else self._constant(name, leaf))
                continue
            alias = shared.get(name, "")
            if isinstance(alias, SameArg):
                args.append(alias)
                continue
            dim: BatchDim
            if exact:
                dim = "reference" if self._declared(name, leaf)[1] == "reference" else None
            else:
                dim = anchor_dim
                if index != anchor:
                    dim = self._batch_dim(name, leaf, batch, seen[index], leads=leads[index])
            args.append(self._tensor(name, leaf, dim, device if index in hosted else None, alias))
        return batch, args, self._signature(args, spec, context)

    def _is_told_by_value(self, name: str, tensor: Tensor, *, beside: bool) -> bool:
        """True if a CPU tensor is told apart by its value; False if it gets a static input on the graph's device.

        Args:
            name: of the argument.
            tensor: the argument.
            beside: True if another argument is on the device. Then a small tensor, until a run showed that the forward
                moves it, is most likely a number for Python.

        Raises:
            CannotBind: the forward uses it on the CPU, and it is too large to be compared at every call.
        """
        where = self.hosts.get(name)
        if where is None:
            return beside and tensor.nbytes <= WATCHED_BYTES
        if where and tensor.nbytes > WATCHED_BYTES:
            raise CannotBind(Reason.WRONG_DEVICE, ". ".join(used_on_cpu(name, where)).removesuffix("."))
        return bool(where)

    def learn_hosts(self, seen: HostArguments) -> bool:
        """Remember what a run did with CPU tensors that it was passed; True if other calls are now read otherwise.

        One that some run used on the CPU is never taken for one that the forward only moves.
        """
        known = dict.fromkeys(seen.moved, "") | seen.read
        new = {name: where for name, where in known.items() if not self.hosts.get(name)}
        by_value = {name for key, names in seen.names.items() if key not in seen.static for name in names}
        self.hosts |= new
        while len(self.hosts) > _MAX_HOSTS:
            del self.hosts[next(iter(self.hosts))]
        return any((name in by_value) is not bool(where) for name, where in new.items())

    def _check_tensors(
        self, leaves: Sequence[Any], names: Sequence[str], tensors: Sequence[int], hosted: Container[int]
    ) -> None:
        on_device = [index for index in tensors if index not in hosted]
        for index in tensors:
            tensor, name = leaves[index], names[index]
            if type(tensor) not in PLAIN_TENSORS:
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:  # torch dies of its bytes
                kind = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}, {tensor.dtype}"
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} {kind}")
            first = on_device[0] if on_device else index
            if index not in hosted and tensor.device != leaves[first].device:
                where = f"{name} is on {tensor.device}, {names[first]} on {leaves[first].device}"
                raise CannotBind(Reason.WRONG_DEVICE, where)

    def _declared(self, name: str, tensor: Tensor) -> tuple[bool, BatchDim]:
        """Look up if, and as what, the batch dimension of an argument is declared; a prefix declares all below it."""
        declared = self._config.batch_dims
        for prefix in prefixes(name):
            if prefix in declared:
                return True, declared[prefix]
        known = self._known.dims.get(name.split(".")[0], {})
        return tensor.dim() in known, known.get(tensor.dim())

    def anchor(self, leaves: Sequence[Any], names: Sequence[str], tensors: Sequence[int]) -> tuple[int, int]:
        """Find the tensor that gives the batch size: the first declared one, else the first one's dimension 0.

        Args:
            leaves: of a call.
            names: of the leaves.
            tensors: places of tensors among them.

        Raises:
            CannotBind: none of these has a batch dimension.
        """
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
            if issubclass(type(leaf), Tensor) and (len(seen) < 64 or batch in seen):
                seen[batch] = tuple(leaf.shape)

    def confirmed(self, batch: int, leaves: Sequence[Any], names: Sequence[str], spec: TreeSpec) -> bool:
        """True if no batch dimension of a call is a guess: each is declared, or followed two batch sizes."""
        if self._exact:
            return True
        triples = zip(leaves, names, self._shapes(leaves, spec), strict=True)
        tensors = ((leaf, name, seen) for leaf, name, seen in triples if issubclass(type(leaf), Tensor))
        guesses = [seen for leaf, name, seen in tensors if not self._declared(name, leaf)[0]]
        return all(any(rows != batch for rows in seen) for seen in guesses)

    def _batch_dim(
        self, name: str, tensor: Tensor, batch: int, seen: dict[int, tuple[int, ...]], *, leads: bool
    ) -> BatchDim:
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
        if leads and 0 in candidates:
            return 0
        if len(candidates) > 1:
            raise CannotBind(
                Reason.AMBIGUOUS_BATCH_DIM, f"{name} has shape {shape}, more than one dimension of {batch}"
            )
        if candidates:
            return candidates.pop()
        if any(then != shape for then in seen.values()):
            raise CannotBind(Reason.BATCH_MISMATCH, f"{name} has shape {shape}, the batch is {batch}")
        return None

    def _aliases(self, tensors: Mapping[str, Tensor]) -> dict[str, SameArg | str]:
        """Find arguments that are the very tensor that another one is, or begin at its address, by name.

        One that is declared otherwise than the other has a static input of its own, and so has one that is a view.
        """
        names = sorted(tensors)  # however they are passed
        found: dict[str, SameArg | str] = {}
        for at, (same, start) in enumerate(aliases([tensors[name] for name in names])):
            name, other, tensor = names[at], names[same], tensors[names[at]]
            if same != at and self._rules(name, tensor) == self._rules(other, tensor):
                found[name] = SameArg(name, Tensor, other, None)
            elif same != at:
                found[name] = f" that is {other}"
            elif start not in (at, -1):
                found[name] = f" that begins where {names[start]} does"
        return found

    def _rules(self, name: str, tensor: Tensor) -> Hashable:
        return self._declared(name, tensor), self._pad(name)

    def _pad(self, name: str) -> PadRule | None:
        return next((self._pads[prefix] for prefix in prefixes(name) if prefix in self._pads), None)

    def _tensor(
        self, name: str, tensor: Tensor, batch_dim: BatchDim, moved_to: torch.device | None, alias: str
    ) -> TensorArg:
        shape = tuple(-1 if dim == batch_dim else size for dim, size in enumerate(tensor.shape))
        if batch_dim == "reference" and moved_to is not None:
            raise CannotBind(
                Reason.WRONG_DEVICE, f"{name} is declared as 'reference' and on the CPU: put it on {moved_to}"
            )
        address = tensor.data_ptr() if batch_dim == "reference" else None
        return (TensorArg if moved_to is None else HostInput)(
            name,
            tensor.dtype,
            moved_to or tensor.device,
            shape,
            batch_dim,
            layout_of(tensor, batch_dim if isinstance(batch_dim, int) else None),
            self._pad(name),
            address,
            type(tensor),
            alias,
        )

    def _constant(self, name: str, value: Any) -> ConstantArg:
        kind: type[Any] = type(value)
        if not _compares_by_value(value):
            hint = "tensors are copied, and numbers, texts and tuples compared"
            if name.partition(".")[0] in ("cache", "past_key_values"):
                hint = "graph_generation serves generate()"
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {kind.__name__}; {hint}")
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
    devices: list[torch.device] = [leaf.device for leaf in leaves if issubclass(type(leaf), Tensor)]
    if default is not None:
        devices.insert(0, default)
    if not devices:
        said = "no argument is a tensor" * bool(leaves) or "nothing was passed: pass an example call, capture_graphs(x)"
        raise CannotBind(Reason.AMBIGUOUS_BATCH_DIM, f"{said}; exact_shapes=True needs none")
    return next((device for device in devices if device.type != "cpu"), devices[0])


def differences(then: Signature, now: Signature) -> list[str]:
    """Say in which arguments and surroundings two signatures differ."""
    before, after = ({arg.name: str(arg) for arg in each.args} for each in (then, now))
    pairs = [(name, before.get(name, "absent"), after.get(name, "absent")) for name in before | after]
    found = [f"{name}: {one} became {other}" for name, one, other in pairs if one != other]
    if then.specs != now.specs and not found:
        found.append("how the arguments nest")
    kinds = ("autocast", "state", "settings", "default devices", "gradients", "values of Python")
    for kind, one, other in zip(kinds, then.context, now.context, strict=True):
        if one != other:
            telling = isinstance(one, (TorchSettings, PlainValues))
            told = one.difference(other) if telling else f"{one} became {other}"
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
    return spec, tuple((leaf.dtype, leaf.dim()) if issubclass(type(leaf), Tensor) else type(leaf) for leaf in leaves)


def _compares_by_value(value: Any) -> bool:
    """True if a value can be a key: defining equality and a hash promises that both stay."""
    kind = type(value)
    try:
        hash(value)
    except Exception:  # an array, a set, what holds such, or of the user's class
        return kind is slice
    for base in (tuple, frozenset):
        if issubclass(kind, base):
            return all(map(_compares_by_value, base.__iter__(value)))
    frozen = all(class_member(kind, name) is not vars(object)[name] for name in ("__hash__", "__eq__"))
    return (frozen and not issubclass(kind, Tensor)) or issubclass(kind, (*ATOMS, *_ROUTINES))
