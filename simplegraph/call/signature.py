"""The signature of a call: its leaves, their names and batch dimensions, and all properties that a graph fixes."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.config import BatchDim, CudaGraphConfig, PadRule
from simplegraph.base.constants import WATCHED_BYTES
from simplegraph.base.errors import ConfigError, InputError, did_you_mean
from simplegraph.base.nested import ARGUMENT_REMEDIES, ATOMS, TreeSpec, constant_key, flatten
from simplegraph.base.objects import class_member
from simplegraph.base.reasons import CannotBind, NoTensor, Reason
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
from simplegraph.program.host_arguments import HostArguments, used_on_cpu

_ROUTINES: tuple[type, ...] = types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType
_ROUTINES += types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType
_MAX_FORMS = 256  # call forms whose shapes are remembered; there may be any number, since keyword names vary
_MAX_HOSTS = 4096  # the most names of CPU tensors that are remembered


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """All properties of a call that a graph fixes, whether arguments are passed by position or by keyword.

    It is a part of every graph's key, and compared by identity: calls with equal `values` share one (see `CallTable`).
    """

    args: tuple[Arg, ...]
    specs: tuple[tuple[str, TreeSpec], ...]
    context: tuple[Any, ...]

    @property
    def values(self) -> Hashable:
        return self.args, self.specs, self.context


def check_names(forward: Callable[..., Any], config: CudaGraphConfig) -> None:
    """Refuse settings for arguments that do not exist: a misspelt argument would silently be padded by another rule.

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
            if name.split(".")[0] not in names and not name.startswith("self."):  # "self." names carried tensors
                hint = did_you_mean([name.split(".")[0]], names)
                takes = ", ".join(names) or "nothing"
                raise ConfigError(f"{setting} names {name!r}{hint}, but forward takes {takes}.")


@dataclasses.dataclass(frozen=True)
class ArgumentRules:
    """The known batch dimensions and padding of the arguments of one of torch's own modules.

    Attributes:
        dims: argument name -> number of dimensions of the tensor -> batch dimension.
        pads: argument name -> rule for padding rows.
    """

    dims: Mapping[str, Mapping[int, int | None]] = dataclasses.field(default_factory=dict)
    pads: Mapping[str, Any] = dataclasses.field(default_factory=dict)


NO_RULES = ArgumentRules()


def argument_rules(module: nn.Module) -> ArgumentRules:
    """Return the rules for a module's arguments; no rules if its forward is not torch's own."""
    for kind, read in _MODULES.items():
        if isinstance(module, kind) and getattr(type(module), "forward", None) in _forwards(kind):
            return read(module)
    return NO_RULES


def _forwards(kind: Any) -> list[Any]:
    """List the forwards of a class of torch, and of its subclasses in the same file."""
    kinds = [kind, *(child for child in kind.__subclasses__() if child.__module__ == kind.__module__)]
    return [child.forward for child in kinds]


def _recurrent(module: Any) -> ArgumentRules:
    """Return rules for a recurrent layer, whose hidden states are (layers, batch, width) whatever `batch_first` is."""
    return ArgumentRules({"input": {3: 0 if module.batch_first else 1}, "hx": {3: 1}})


def _cell(module: Any) -> ArgumentRules:
    return ArgumentRules({"input": {2: 0}, "hx": {2: 0}})


def _embedding_bag(module: Any) -> ArgumentRules:
    """Return rules for an embedding bag: if offsets separate bags, the indices are the rows, and offsets are constants.

    Padding indices would count in the last bag, unless `padding_idx` or weights of zero exclude them. In a maximum they
    may begin to count when the embedding's weights change, so such calls run eagerly.
    """
    pads: dict[str, Any] = {"per_sample_weights": "zero"}
    if module.padding_idx is not None:
        pads["input"] = module.padding_idx
    rows: dict[int, int | None] = {1: 0, 2: 0}
    hidden = module.mode == "max" and module.padding_idx is None
    indices = {1: None, 2: 0} if hidden else rows
    return ArgumentRules({"input": indices, "per_sample_weights": rows, "offsets": {1: None}}, pads)


def _attention(module: Any) -> ArgumentRules:
    """Return rules for sequences (three dimensions), masks of keys for each row, and masks that all rows share."""
    first = next((child for child in module.modules() if isinstance(child, nn.MultiheadAttention)), None)
    if first is None:  # its layers are not torch's
        return NO_RULES
    sequences = ("query", "key", "value", "src", "tgt", "memory")
    shared = ("attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask")
    padding = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
    dims: dict[str, Mapping[int, int | None]] = {name: {3: 0 if first.batch_first else 1} for name in sequences}
    dims |= {name: {2: None} for name in shared} | {name: {2: 0} for name in padding}
    return ArgumentRules(dims)


_MODULES: dict[type[nn.Module], Callable[[Any], ArgumentRules]] = {
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


def defaults_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the present defaults of a function's parameters, by name, except those that are positional only."""
    code, defaults = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    by_name = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    for name in names[: code.co_posonlyargcount]:  # a keyword of this name is another argument
        by_name.pop(name, None)
    return by_name | (function.__kwdefaults__ or {})


class CallReader:
    """Reads the calls of one module: names the leaves, finds batch dimensions, and learns from calls.

    Args:
        forward: the function whose parameters name the arguments.
        config: declared batch dimensions and padding.
        rules: the rules for torch's own modules.

    Attributes:
        num_observed: the number of observed eager runs and captures; if it grew, new knowledge may be there.
        hosts: name of a CPU tensor that a forward on another device is passed -> the line that uses it on the CPU;
            empty if the forward only moves it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        config: CudaGraphConfig,
        rules: ArgumentRules = NO_RULES,
    ) -> None:
        self._config, self._argument_rules = config, rules
        self._exact = config.exact_shapes
        self.num_observed = 0
        self.hosts: dict[str, str] = {}
        self._pads = {**rules.pads, **config.pad_values}
        self._captures_one = config.capture_sizes is None or 1 in config.capture_sizes
        check_names(forward, config)
        # By the form of a call without shapes: {name of a leaf: {batch size: shape}}. The latest form comes last.
        self._seen: dict[Hashable, dict[str, dict[int, tuple[int, ...]]]] = {}
        self._function: Any = None  # a weak reference, lest a replaced forward be kept alive
        self._kinds: list[tuple[str, Any]] | None = None  # names and kinds of the parameters
        self.use(forward)

    def use(self, forward: Callable[..., Any], *, hooked: bool = False) -> None:
        """Read calls by the parameters of this forward, and by the defaults that it has now.

        Args:
            forward: it may have been replaced, or got other defaults, since the last call.
            hooked: True if hooks see the arguments of calls: they may tell a default from an argument left out.
        """
        function: Any = getattr(forward, "__func__", forward)
        is_function = type(function) is types.FunctionType
        if not is_function or self._function is None or self._function() is not function:
            self._function = weakref.ref(function) if is_function else None
            self._read_parameters(inspect.signature(forward).parameters.values())
        # The function's own: those of a function that it decorates are not what it is called with.
        self._defaults = defaults_of(function) if is_function and not hooked else {}

    def _read_parameters(self, parameters: Collection[inspect.Parameter]) -> None:
        """Take the parameters' names; what was learnt by other names is forgotten."""
        kinds = [(p.name, p.kind) for p in parameters]
        if kinds != self._kinds:
            self._kinds = kinds
            self._seen.clear()
            self.hosts.clear()
            self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            self._positional_only = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
            self._var_positional = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
            self._var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "kwargs")
            named = sorted(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
            self._places = {name: place for place, name in enumerate(named)}  # in any order that arguments come in

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], list[str], TreeSpec]:
        """Return a call's leaves, their names, and their structure."""
        leaves, spec = flatten((args, dict(kwargs)))
        return leaves, self.names(spec), spec

    def names(self, spec: TreeSpec) -> list[str]:
        """Name the leaves of a call."""
        return [name for argument, child in self._arguments(spec) for name in child.names(argument)]

    def _arguments(self, spec: TreeSpec) -> list[tuple[str, TreeSpec]]:
        """Return the name and the structure of each argument of a call."""
        positional, keyword = spec.children
        extra = f"{self._var_positional}."
        names = itertools.chain(self._positional, (f"{extra}{index}" for index in range(len(positional.children))))
        keywords = [
            f"{self._var_keyword}.{key}" if key in self._positional_only or key.startswith(extra) else key
            for key in keyword.keys
        ]
        return [*zip(names, positional.children), *zip(keywords, keyword.children)]  # noqa: B905

    def _in_one_order(self, spec: TreeSpec, left_out: set[str]) -> list[tuple[str, TreeSpec]]:
        """Return the name and the structure of each argument that is not left out, in the order of the parameters.

        Keywords without a parameter keep the order of the call, since a forward can see it.
        """
        named = (pair for pair in self._arguments(spec) if pair[0] not in left_out)
        return sorted(named, key=lambda pair: self._places.get(pair[0], len(self._places)))

    def _left_out(self, leaves: Sequence[Any], names: Sequence[str]) -> set[str]:
        """Return the names of arguments that have their defaults: calls that leave them out are the same calls."""
        left_out = set()
        for leaf, name in zip(leaves, names, strict=True):
            if name in self._defaults and _compares_by_value(leaf):  # no tensor: the forward may write to one
                constant = ConstantArg(name, type(leaf), constant_key(leaf), leaf)
                if constant.holds(self._defaults[name]):
                    left_out.add(name)
        return left_out

    def read(
        self,
        leaves: list[Any],
        names: Sequence[str],
        spec: TreeSpec,
        context: tuple[Any, ...],
        device: torch.device | None = None,
        *,
        exact: bool = False,
    ) -> tuple[int, list[Arg], Signature]:
        """Return the batch size of a call, its arguments in order, and its signature.

        Without batch dimensions (`exact_shapes`, or `exact`) the size is 1. `device` is the call's device if no tensor
        is passed.

        Raises:
            CannotBind: a graph cannot serve the call.
        """
        if len(set(names)) < len(names):  # such as {1: x, "1": y}; static inputs need distinct names
            twice = next(name for index, name in enumerate(names) if name in names[:index])
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"two arguments are called {twice}; rename one")
        tensors = [index for index, leaf in enumerate(leaves) if issubclass(type(leaf), Tensor)]
        device = device_of(leaves, device)
        hosted = {index for index in tensors if leaves[index].is_cpu and device.type != "cpu"}
        self._check_tensors(leaves, names, tensors, hosted)  # first, since not all tensors support the calls below
        beside = len(hosted) < len(tensors)
        by_value = {index for index in hosted if self._is_compared_by_value(names[index], leaves[index], beside=beside)}
        tensors = [index for index in tensors if index not in by_value]
        exact = exact or self._exact
        anchor, anchor_dim = (-1, 0) if exact else self.anchor(leaves, names, tensors)
        batch = 1 if exact else leaves[anchor].shape[anchor_dim]
        if batch == 0:
            raise CannotBind(Reason.EMPTY_BATCH, f"{names[anchor]} has shape {tuple(leaves[anchor].shape)}")
        shapes = self._seen.get(self._form(leaves, names, spec), {})
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
                    dim = self._batch_dim(name, leaf, batch, shapes.get(name, {}), leads=leads[index])
            args.append(self._tensor(name, leaf, dim, device if index in hosted else None, alias))
        left_out = self._left_out(leaves, names)
        kept = sorted((arg for arg in args if arg.name not in left_out), key=operator.attrgetter("name"))
        return batch, args, Signature(tuple(kept), tuple(self._in_one_order(spec, left_out)), context)

    def _is_compared_by_value(self, name: str, tensor: Tensor, *, beside: bool) -> bool:
        """True if a CPU tensor is compared by value; False if it gets a static input on the graph's device.

        Args:
            name: the name of the argument.
            tensor: the argument.
            beside: True if another argument is on the device. Then a small CPU tensor is assumed to be a number that
                Python code reads, until a run shows that the forward moves it to the device.

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
        """Learn how a run used CPU tensors that it was passed; True if such calls are read differently from now on.

        A tensor that any run used on the CPU never counts as a tensor that the forward only moves.
        """
        uses = dict.fromkeys(seen.moved, "") | seen.read
        new = {name: where for name, where in uses.items() if not self.hosts.get(name)}
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
            if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:  # bytes would crash torch
                kind = "is a nested tensor" if tensor.is_nested else f"has layout {tensor.layout}, {tensor.dtype}"
                raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} {kind}")
            first = on_device[0] if on_device else index
            if index not in hosted and tensor.device != leaves[first].device:
                where = f"{name} is on {tensor.device}, {names[first]} on {leaves[first].device}"
                raise CannotBind(Reason.WRONG_DEVICE, where)

    def _declared(self, name: str, tensor: Tensor) -> tuple[bool, BatchDim]:
        """Return (True if declared, batch dimension) of an argument; a prefix of its name declares all leaves below."""
        declared = self._config.batch_dims
        for prefix in prefixes(name):
            if prefix in declared:
                return True, declared[prefix]
        dims = self._argument_rules.dims.get(name.split(".")[0], {})
        return tensor.dim() in dims, dims.get(tensor.dim())

    def anchor(self, leaves: Sequence[Any], names: Sequence[str], tensors: Sequence[int]) -> tuple[int, int]:
        """Return the leaf's index and the dimension that give the batch size: the first declared one, else dimension 0.

        Args:
            leaves: the leaves of a call.
            names: their names.
            tensors: the indices of tensors among them.

        Raises:
            CannotBind: no tensor has a batch dimension.
        """
        for index in tensors:
            _, dim = self._declared(names[index], leaves[index])
            if isinstance(dim, int):
                return index, _normal(dim, leaves[index], names[index])
        for index in tensors:
            if leaves[index].dim() and not self._declared(names[index], leaves[index])[0]:
                return index, 0
        raise CannotBind(Reason.AMBIGUOUS_BATCH_DIM, "no tensor argument has a batch dimension")

    def learn(self, batch: int, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Note the shapes of a call that succeeded: two calls of different sizes show the batch dimensions."""
        names = self.names(spec)
        form = self._form(leaves, names, spec)
        shapes = self._seen[form] = self._seen.pop(form, {})
        while len(self._seen) > _MAX_FORMS:
            del self._seen[next(iter(self._seen))]
        for leaf, name in zip(leaves, names, strict=True):
            seen = shapes.setdefault(name, {})
            if issubclass(type(leaf), Tensor) and (len(seen) < 64 or batch in seen):
                seen[batch] = tuple(leaf.shape)

    def _form(self, leaves: Sequence[Any], names: Sequence[str], spec: TreeSpec) -> Hashable:
        """Describe a call without its shapes."""
        left_out = self._left_out(leaves, names)
        kinds: list[Hashable] = []
        for leaf, name in zip(leaves, names, strict=True):
            if name not in left_out:
                kinds.append((name, leaf.dtype, leaf.dim()) if issubclass(type(leaf), Tensor) else (name, type(leaf)))
        return tuple(self._in_one_order(spec, left_out)), frozenset(kinds)

    def confirmed(self, batch: int, leaves: Sequence[Any], names: Sequence[str], spec: TreeSpec) -> bool:
        """True if each batch dimension of a call is declared, or known from two batch sizes."""
        if self._exact:
            return True
        shapes = self._seen.get(self._form(leaves, names, spec), {})
        tensors = ((leaf, name) for leaf, name in zip(leaves, names, strict=True) if issubclass(type(leaf), Tensor))
        guesses = [shapes.get(name, {}) for leaf, name in tensors if not self._declared(name, leaf)[0]]
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
            if size == batch
            and all(dim < len(seen_shape) and seen_shape[dim] == rows for rows, seen_shape in seen.items())
        }
        if batch == 1 and 0 in candidates and self._captures_one:
            return 0  # other dimensions of 1 are broadcast, and at size 1 nothing is padded anyway
        if leads and 0 in candidates:
            return 0
        if len(candidates) > 1:
            raise CannotBind(
                Reason.AMBIGUOUS_BATCH_DIM, f"{name} has shape {shape}, more than one dimension of {batch}"
            )
        if candidates:
            return candidates.pop()
        if any(seen_shape != shape for seen_shape in seen.values()):
            raise CannotBind(Reason.BATCH_MISMATCH, f"{name} has shape {shape}, the batch is {batch}")
        return None

    def _aliases(self, tensors: Mapping[str, Tensor]) -> dict[str, SameArg | str]:
        """Find arguments that are the same tensor as another argument, or begin at its address, by name.

        An argument that is declared differently, or is a view of the other argument, has a static input of its own.
        """
        names = sorted(tensors)  # the same order for positional and keyword arguments
        shared: dict[str, SameArg | str] = {}
        for at, (same, start) in enumerate(aliases([tensors[name] for name in names])):
            name, other, tensor = names[at], names[same], tensors[names[at]]
            if same != at and self._rules(name, tensor) == self._rules(other, tensor):
                shared[name] = SameArg(name, Tensor, other, None)
            elif same != at:
                shared[name] = f" that is {other}"
            elif start not in (at, -1):
                shared[name] = f" that begins where {names[start]} does"
        return shared

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
            general = "tensors are copied, and numbers, texts and tuples compared"
            hint = ARGUMENT_REMEDIES.get(name.partition(".")[0], general)
            raise CannotBind(Reason.OPAQUE_ARGUMENT, f"{name} is a {kind.__name__}; {hint}")
        return ConstantArg(name, kind, constant_key(value), value)


def device_of(leaves: Sequence[Any], default: torch.device | None = None) -> torch.device:
    """Return the device of a call: that of the first tensor that is not on the CPU, or else the CPU.

    Raises:
        CannotBind: no leaf is a tensor, and there is no default.
    """
    devices: list[torch.device] = [leaf.device for leaf in leaves if issubclass(type(leaf), Tensor)]
    if default is not None:
        devices.insert(0, default)
    if not devices:
        said = "no tensor was passed, so there is no batch dimension: pass a tensor, or set exact_shapes=True"
        raise NoTensor(Reason.AMBIGUOUS_BATCH_DIM, said)
    return next((device for device in devices if device.type != "cpu"), devices[0])


def differences(before: Signature, after: Signature) -> list[str]:
    """Describe the differences of two signatures: arguments, their structure, and the call's context."""
    args_before, args_after = ({arg.name: str(arg) for arg in signature.args} for signature in (before, after))
    pairs = [
        (name, args_before.get(name, "absent"), args_after.get(name, "absent")) for name in args_before | args_after
    ]
    differing = [f"{name} changed from {one} to {other}" for name, one, other in pairs if one != other]
    if before.specs != after.specs and not differing:
        differing.append("the arguments nest differently")
    kinds = ("autocast", "the state", "settings", "the default devices", "gradients", "Python values")
    for kind, one, other in zip(kinds, before.context, after.context, strict=True):
        if one != other:
            compares = isinstance(one, (TorchSettings, PlainValues))
            differing.append(one.difference(other) if compares else f"{kind} changed from {one} to {other}")
    return differing or ["arguments that look alike differ in their addresses or rules of padding"]


def prefixes(name: str) -> Iterator[str]:
    """Yield the names that may declare an argument: ``states.0.x``, ``states.0``, ``states``."""
    parts = name.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _normal(dim: int, tensor: Tensor, name: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"batch_dims[{name!r}] is {dim}, but {name} has shape {tuple(tensor.shape)}; "
            f"expected a dimension from {-tensor.dim()} to {tensor.dim() - 1}."
        )
    return dim % tensor.dim()


def _compares_by_value(value: Any) -> bool:
    """True if a value can be a key: its class defines equality and a hash, which promises that both stay the same."""
    kind = type(value)
    try:
        hash(value)
        constant_key(value)  # the text of a number of a user's class
    except Exception:  # such as an array, a set, or an object of a user's class
        return kind is slice
    for base in (tuple, frozenset):
        if issubclass(kind, base):
            return all(map(_compares_by_value, base.__iter__(value)))
    frozen = all(class_member(kind, name) is not vars(object)[name] for name in ("__hash__", "__eq__"))
    return (frozen and not issubclass(kind, Tensor)) or issubclass(kind, (*ATOMS, *_ROUTINES))
