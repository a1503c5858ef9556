"""Serves calls of any length by graphs of a few: pads inputs to the next captured length, and cuts outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simplegraph.config import CudaGraphConfig
from simplegraph.context import CALLS, bypassed
from simplegraph.errors import CaptureError, InputError
from simplegraph.graph.device import CAPTURE_LOCK
from simplegraph.graph.generators import default_generator, put_random_states, random_states
from simplegraph.graph.memory import SavedMemory, copy_limit
from simplegraph.graph.select import graph_device
from simplegraph.graph.tensors import parts, storage_key
from simplegraph.manager.differences import cloned, first_difference
from simplegraph.manager.jobs import CaptureSummary
from simplegraph.manager.stats import GraphStats
from simplegraph.module.call import invoke
from simplegraph.module.outputs import unreturnable
from simplegraph.module.signature import CallReader, device_of
from simplegraph.module.snapshot import Snapshot, has_address
from simplegraph.module.state import any_requires_grad
from simplegraph.module.survey import Survey, held_tensors
from simplegraph.nested import ATOMS, TreeSpec, flatten
from simplegraph.reasons import CannotBind, Reason

_COMPARED = 2  # calls of a kind, of different lengths, whose padded answer is compared before one is served
_MAX_KINDS, _MAX_LENGTHS, _MAX_STRIDE = 256, 512, 4096


class Server(Protocol):
    """Serves calls of one length."""

    stats: GraphStats

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call."""

    def capture_all(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureSummary:
        """Capture every batch size."""


class SizeRule:
    """Predicts a size of an output from the length, as pairs that were seen tell: ``(length - a) // stride + 1``.

    Whatever windows and strides follow each other, sizes are of this form; a size is known once all strides that fit
    the pairs agree on it.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def learn(self, length: int, size: int) -> None:
        """Remember the size at a length."""
        if length in self._seen or len(self._seen) < _MAX_LENGTHS:
            self._seen[length] = size

    def predict(self, length: int) -> int | None:
        """Return the size at a length; None if it does not follow from what was seen."""
        if length in self._seen or not self._seen:
            return self._seen.get(length)
        found: set[int] = set()
        for stride in range(1, _MAX_STRIDE):
            least = max(at - size * stride + 1 for at, size in self._seen.items())
            most = min(at - (size - 1) * stride for at, size in self._seen.items())
            if least <= most:
                found |= {(length - least) // stride + 1, (length - most) // stride + 1}
            if len(found) > 1:
                return None
        return found.pop() if found else None


class OutputLengths:
    """Cuts the outputs of padded calls of one kind to what the caller's own length gives."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], SizeRule] = {}  # by output and dimension
        self._known: dict[int, dict[tuple[int, int], int]] = {}  # by length
        self._compared: set[int] = set()
        self._least: dict[int, int] = {}  # by captured length, the least length that was compared with it
        self._refusal: CannotBind | None = None

    def check(self) -> None:
        """Refuse such calls if padding changes their answer. Raises CannotBind."""
        if self._refusal is not None:
            raise self._refusal.again()

    def sizes(self, length: int, padded: int) -> dict[tuple[int, int], int] | None:
        """Return the sizes that padding changes, by output and dimension; None if they are not known.

        What did not grow between a shorter length and the captured one does not grow from this one on, either.
        """
        known = len(self._compared) >= _COMPARED or length in self._compared
        if not known or length < self._least.get(padded, length + 1):
            return None
        if length not in self._known:
            found = {at: rule.predict(length) for at, rule in self._sizes.items()}
            sizes = {at: size for at, size in found.items() if size is not None}
            if len(sizes) < len(found):
                return None
            if len(self._known) >= _MAX_LENGTHS:
                self._known.clear()
            self._known[length] = sizes
        return self._known[length]

    def learn(self, length: int, padded: int, outputs: Any, padded_outputs: tuple[list[Any], TreeSpec]) -> None:
        """Learn from the outputs of one call as it is, and padded."""
        (leaves, spec), (others, other_spec) = flatten(outputs), padded_outputs
        opaque = unreturnable(leaves)
        if opaque is not None:
            self._refusal = CannotBind(Reason.UNSUPPORTED_OUTPUT, opaque)
            return
        said = f"from {length} to {padded}"
        if spec != other_spec:
            self._refusal = CannotBind(Reason.LENGTH_PADDING, f"{said}, the structure of the outputs changes")
            return
        for index, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
            for dim in _grown_dims(leaf, other):
                self._sizes.setdefault((index, dim), SizeRule())
        for (index, dim), rule in self._sizes.items():
            rule.learn(length, leaves[index].shape[dim])
            rule.learn(padded, others[index].shape[dim])
        self._known.clear()
        self._least[padded] = min(length, self._least.get(padded, length))
        cut = _cut(others, {at: leaves[at[0]].shape[at[1]] for at in self._sizes})
        found = first_difference(cut, leaves)
        if found is not None:
            self._refusal = CannotBind(Reason.LENGTH_PADDING, f"{said}, {found}")
        self._compared.add(length)


class PaddedCall:
    """A call, read: its leaves, its length and the captured length that it is padded to.

    Args:
        leaves, names, spec: of the call.
        config: which dimensions are lengths, and how they are padded.

    Raises:
        CannotBind: it has no length, several, or one above all captured ones.
    """

    def __init__(self, leaves: list[Any], names: list[str], spec: TreeSpec, config: CudaGraphConfig) -> None:
        self.leaves, self.spec = leaves, spec
        named = [(index, leaf, _declared(config.length_dims, names[index])) for index, leaf in enumerate(leaves)]
        self._dims = {index: dim for index, leaf, dim in named if dim is not None and isinstance(leaf, Tensor)}
        for index, dim in self._dims.items():
            if not -leaves[index].dim() <= dim < leaves[index].dim():
                shape = tuple(leaves[index].shape)
                raise InputError(f"length_dims[{names[index]!r}] is {dim}, but {names[index]} has shape {shape}.")
        self._pads = {index: _declared(config.pad_values, names[index]) for index in self._dims}
        lengths = {leaves[index].shape[dim]: names[index] for index, dim in self._dims.items()}
        if len(lengths) != 1:
            said = ", ".join(f"{name} of {length}" for length, name in lengths.items())
            given = f"length_dims names {', '.join(config.length_dims or ())}; the arguments are {', '.join(names)}"
            said = said or given
            raise CannotBind(Reason.LENGTH_MISMATCH, said)
        self.length = next(iter(lengths))
        captured = config.lengths or ()
        if self.length > captured[-1]:
            raise CannotBind(Reason.LENGTH_TOO_LARGE, f"{self.length}, the largest is {captured[-1]}")
        self.padded = next(length for length in captured if length >= self.length)

    @property
    def kind(self) -> Hashable:
        """Return what tells such calls from others, but for their sizes."""
        plain = (
            leaf if isinstance(leaf, ATOMS) and type(leaf) not in (int, float) else type(leaf) for leaf in self.leaves
        )
        tensors = ((leaf.dtype, leaf.dim(), leaf.device) if isinstance(leaf, Tensor) else None for leaf in self.leaves)
        return self.spec, tuple(map(repr, plain)), tuple(tensors)

    def at(self, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with another length: padded, or cut."""
        leaves = list(self.leaves)
        for index, dim in self._dims.items():
            leaf, pad = leaves[index], self._pads[index]
            more = length - self.length
            if more < 0:
                leaves[index] = leaf.narrow(dim, 0, length)
            elif more:
                pads = [0, 0] * (leaf.dim() - 1 - dim % leaf.dim()) + [0, more]
                leaves[index] = F.pad(leaf, pads, value=pad if isinstance(pad, (int, float)) else 0)
        args, kwargs = self.spec.unflatten(leaves)
        return args, kwargs


@dataclasses.dataclass(eq=False)
class LengthBuckets:
    """Pads calls of one module to captured lengths.

    The first calls of each kind run as they are; before, the padded call is rehearsed, and nothing of that stays. If
    their answers differ, such calls run eagerly.

    Args:
        config: the lengths, and which dimensions they are.
    """

    config: CudaGraphConfig
    _rules: dict[Hashable, OutputLengths] = dataclasses.field(default_factory=dict)
    _reader: CallReader | None = None

    def call(self, server: Server, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call."""
        context = CALLS.context
        wants_grad = torch.is_grad_enabled() and any_requires_grad(module.parameters())
        if module.training or wants_grad or (context is not None and context.bypass is not None):
            return server.call(module, args, kwargs)  # which says why it runs eagerly
        try:
            call = self._read(module, args, kwargs)
            if call.length == call.padded:
                return server.call(module, args, kwargs)
            rule = self._rule(call.kind)
            rule.check()
        except CannotBind as error:
            server.stats.name = module._get_name()
            server.stats.ran_eagerly(error.reason, error.detail)
            return invoke(module, args, kwargs)
        sizes = rule.sizes(call.length, call.padded)
        if sizes is None:
            return self._learn(server, rule, call, module)
        leaves, spec = flatten(server.call(module, *call.at(call.padded)))
        return spec.unflatten(_cut(leaves, sizes))

    def capture_all(self, server: Server, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureSummary:
        """Capture every batch size at every length, the longest first. Raises InputError."""
        try:
            call = self._read(module, args, kwargs)
        except CannotBind as error:
            raise InputError(f"capture_graphs cannot use this call: {error.explained}") from None
        failed: dict[str, CaptureError] = {}
        captured, seconds, taken = 0, 0.0, 0
        for length in reversed(self.config.lengths or ()):
            summary = server.capture_all(module, *call.at(length))
            failed |= {f"{label}, length {length}": error for label, error in summary.failed.items()}
            captured += summary.captured
            seconds, taken = seconds + summary.seconds, taken + summary.bytes
        return CaptureSummary(captured, failed, seconds, taken)

    def _read(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PaddedCall:
        if self._reader is None:
            self._reader = CallReader(module.forward, self.config)
        return PaddedCall(*self._reader.leaves(args, kwargs), self.config)

    def _rule(self, kind: Hashable) -> OutputLengths:
        if kind not in self._rules and len(self._rules) >= _MAX_KINDS:
            self._rules.clear()
        return self._rules.setdefault(kind, OutputLengths())

    def _learn(self, server: Server, rule: OutputLengths, call: PaddedCall, module: Any) -> Any:
        """Run a call eagerly as it is, and compare it with what its padded form gave."""
        args, kwargs = call.at(call.length)
        server.stats.name = module._get_name()
        server.stats.ran_eagerly(Reason.LENGTH_LEARNT)
        padded = _rehearsed(module, *call.at(call.padded), device_of(call.leaves))
        outputs = invoke(module, args, kwargs)
        rule.learn(call.length, call.padded, outputs, padded)
        return outputs


def _rehearsed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[list[Any], TreeSpec]:
    """Run the module on these arguments, and put back what that changed: memory, random numbers, Python's objects."""
    held: dict[int, tuple[str, Tensor]] = {}
    for entry in held_tensors(module):
        for part in parts(entry.tensor):
            if has_address(part) and not isinstance(part, nn.Parameter):
                held.setdefault(storage_key(part), (entry.name, part))
    saved = SavedMemory((), list(held.values()), ())
    own = (default_generator(device), torch.default_generator, *Survey(module).generators.values())
    generators = tuple({id(generator): generator for generator in own}.values())
    with CAPTURE_LOCK, contextlib.ExitStack() as undo:
        if saved.nbytes <= copy_limit(graph_device(device).free_memory()):
            undo.callback(saved.put, saved.copy())
        undo.callback(put_random_states, generators, random_states(generators))
        undo.callback(Snapshot(module).put_back)
        with bypassed(Reason.NESTED):
            leaves, spec = flatten(invoke(module, args, kwargs))
        return cloned(leaves), spec


def _declared(declared: Mapping[str, Any], name: str) -> Any:
    steps = name.split(".")
    prefixes = (".".join(steps[:end]) for end in range(len(steps), 0, -1))
    return next((declared[prefix] for prefix in prefixes if prefix in declared), None)


def _grown_dims(leaf: Any, other: Any) -> Sequence[int]:
    if not isinstance(leaf, Tensor) or not isinstance(other, Tensor) or leaf.dim() != other.dim():
        return ()
    return [dim for dim in range(leaf.dim()) if leaf.shape[dim] < other.shape[dim]]


def _cut(leaves: Sequence[Any], sizes: Mapping[tuple[int, int], int]) -> list[Any]:
    cut = list(leaves)
    for (index, dim), size in sizes.items():
        cut[index] = cut[index].narrow(dim, 0, size)
    return cut
