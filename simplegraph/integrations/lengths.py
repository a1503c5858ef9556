"""Serve calls of any length by graphs of a few lengths: pad inputs to the next captured length, and cut outputs."""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.context import CALLS
from simplegraph.base.errors import InputError
from simplegraph.base.nested import ATOMS, TreeSpec, containers, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.call.call import invoke
from simplegraph.call.outputs import unreturnable
from simplegraph.call.signature import CallReader, argument_rules, device_of, prefixes
from simplegraph.guard.guards import any_requires_grad
from simplegraph.integrations.rehearsal import RunEffects, observe_run, rehearse
from simplegraph.manager.replay_proof import EXACT, first_difference, leaf_difference
from simplegraph.manager.stats import CaptureSummary
from simplegraph.serve.call_proof import first_distance

_COST = 100.0  # the assumed time of a comparison, in calls
_COMPARED = 2  # padded calls of a kind, with different lengths, that are compared before a call is served
_TRIED = 8  # sizes that must be predicted correctly before predictions count
MAX_KINDS = 256  # of calls
_MAX_LENGTHS, _MAX_STRIDE, _MAX_COUNTED = 512, 4096, 1 << 16


def wrong_since(served: int) -> str:
    """Return the end of a refusal: the number of calls since padding had no effect."""
    return f"; it did not {served:,} calls ago, and answers since then may be wrong"


class LengthProofs:
    """Decides when a padded call is compared with eager: the first of each captured length, and later ones at times.

    Args:
        verify: the setting; with 0, later calls are not compared.
    """

    def __init__(self, verify: int) -> None:
        self._first = first_distance(_COST, verify) if verify else 0
        self._calls_until_proof: dict[Hashable, int] = {}  # by kind of call and captured length
        self._distance: dict[Hashable, int] = {}  # calls between the last comparison and the next; it doubles

    def due(self, calls: Hashable) -> bool:
        """Count a call; True if it must be compared."""
        if not self._first or calls not in self._calls_until_proof:
            return self._first > 0
        self._calls_until_proof[calls] -= 1
        return self._calls_until_proof[calls] < 0

    def compared(self, calls: Hashable) -> int:
        """Note that a call was compared; return the number of its kind that were served since the last comparison."""
        before = self._distance.get(calls, 0)
        self._calls_until_proof[calls] = self._distance[calls] = 2 * before or self._first
        return before


Lengths = tuple[int, ...]  # of a call, by the names of its lengths


def said_of(lengths: Lengths, padded: int) -> str:
    """Describe the padding of a call: its lengths, and the captured length."""
    return f"from {' and '.join(map(str, lengths))} to {padded}"


class SizeRule:
    """Predicts a size of an output from the length, from known pairs: ``(length - a) // stride + 1``.

    Any sequence of windows and strides leads to sizes of this form. A size is known as soon as all strides that fit the
    pairs agree on it. Sizes of another form may fit a few pairs by chance, so each pair must also follow from the
    others: after a wrong prediction, no stride fits.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._changed = False  # a length has had two sizes

    def learn(self, length: int, size: int) -> None:
        """Remember the size at a length."""
        self._changed = self._changed or self._seen.get(length, size) != size
        if len(self._seen) < _MAX_LENGTHS or self.predict(length) not in (None, size):
            self._seen[length] = size

    @property
    def fits(self) -> bool:
        """True if the known sizes may follow this length."""
        return not self._changed and any(_window(stride, self._seen, self._seen) for stride in range(1, _MAX_STRIDE))

    def predict(self, length: int) -> int | None:
        """Return the size at a length; None if it does not follow from the known pairs."""
        if length in self._seen:
            return self._seen[length]
        tried = dict(list(self._seen.items())[:_TRIED])
        follows = any(_fitting(at, tried.keys() - {at}, tried) == size for at, size in tried.items())
        return _fitting(length, self._seen, self._seen) if follows else None


def _window(stride: int, seen: Collection[int], sizes: Mapping[int, int]) -> tuple[int, ...]:
    """Return the smallest and the largest first window with which a stride fits the known sizes; () if none does."""
    least = max((at - sizes[at] * stride + 1 for at in seen), default=0)
    most = min((at - (sizes[at] - 1) * stride for at in seen), default=0)
    return (least, most) if least <= most else ()


def _fitting(length: int, seen: Collection[int], sizes: Mapping[int, int]) -> int | None:
    """Return the only size at a length that fits the known sizes; None if no size fits, or several do."""
    fitting: set[int] = set()
    for stride in range(1, _MAX_STRIDE) if seen else ():
        fitting |= {(length - first) // stride + 1 for first in _window(stride, seen, sizes)}
        if len(fitting) > 1:
            return None
    return fitting.pop() if fitting else None


class OutputLengths:
    """Cuts the outputs of padded calls of one kind to the sizes that the caller's length gives.

    Args:
        verify: the setting.

    Attributes:
        proofs: tell when calls padded to a length are compared.
    """

    def __init__(self, verify: int) -> None:
        self.proofs = LengthProofs(verify)
        # By output and dimension, for each of the lengths that it may follow.
        self._sizes: dict[tuple[int, int], list[SizeRule]] = {}
        self._grown: set[tuple[int, int]] = set()  # those that padding changed
        self._otherwise: set[str] = set()  # places below the module where padding changed what the forward left
        self._done_flags: set[str] = set()
        self._sizes_at: dict[Lengths, dict[tuple[int, int], int]] = {}
        self._compared: set[Lengths] = set()
        self._least: dict[int, Lengths] = {}  # by captured length, the least ones that were compared with it
        self._refusal: CannotBind | None = None

    def check(self) -> None:
        """Raise CannotBind if padding changes the results of such calls."""
        if self._refusal is not None:
            raise self._refusal.again()

    def refuse(self, why: str) -> None:
        """Run such calls without padding from now on."""
        self._refusal = self._refusal or CannotBind(Reason.LENGTH_PADDING, why)

    def sizes(self, lengths: Lengths, padded: int) -> dict[tuple[int, int], int] | None:
        """Return the sizes that padding changes, by output and dimension; None if they are not known.

        A dimension that did not grow from a shorter length to the captured one does not grow from this length, either.
        """
        compared = len(self._compared) >= _COMPARED or lengths in self._compared
        if not compared or padded not in self._least or any(map(operator.lt, lengths, self._least[padded])):
            return None
        if lengths not in self._sizes_at:
            predicted = {at: self._predict(at, lengths) for at in self._grown}
            sizes = {at: size for at, size in predicted.items() if size is not None}
            if len(sizes) < len(predicted):
                return None
            if len(self._sizes_at) >= _MAX_LENGTHS:
                self._sizes_at.clear()
            self._sizes_at[lengths] = sizes
        return self._sizes_at[lengths]

    def _predict(self, at: tuple[int, int], lengths: Lengths) -> int | None:
        """Return a size; None if it is not known, or if the lengths that it may depend on do not agree."""
        rules = list(zip(self._sizes[at], lengths, strict=True))
        predictions = {rule.predict(length) for rule, length in rules if len(rules) == 1 or rule.fits}
        return predictions.pop() if len(predictions) == 1 else None

    def learn(self, lengths: Lengths, padded: int, run: RunEffects, padded_run: RunEffects) -> None:
        """Learn from the outputs and the effects of a call, without and with padding."""
        leaves, others, said = run.leaves, padded_run.leaves, said_of(lengths, padded)
        refusal = unlike_outputs(run, padded_run, said)
        if refusal is not None:
            self._refusal = refusal
            return
        for index, (leaf, other) in enumerate(zip(leaves, others, strict=True)):
            self._grown |= {(index, dim) for dim in grown_dims(leaf, other)}
            for seen, output in ((lengths, leaf), ([padded] * len(lengths), other)):
                for dim, size in enumerate(output.shape if isinstance(output, Tensor) else ()):
                    rules = self._sizes.setdefault((index, dim), [SizeRule() for _ in lengths])
                    for rule, length in zip(rules, seen, strict=True):
                        rule.learn(length, size)
        self._sizes_at.clear()
        self._least[padded] = tuple(map(min, lengths, self._least.get(padded, lengths)))
        problem = first_difference(cut_outputs(others, {at: leaves[at[0]].shape[at[1]] for at in self._grown}), leaves)
        served = self.proofs.compared(padded)
        if problem is not None and served:
            problem += wrong_since(served)
        otherwise = padded_run.differing_tensors(run)
        problem = problem or next((f"{name}, which it sets, differs" for name in otherwise & self._otherwise), None)
        self._otherwise |= otherwise
        if padded_run.done_flags and self._done_flags:
            problem = problem or f"it sets {', '.join(sorted(padded_run.done_flags)[:5])}, as it did before"
        self._done_flags |= padded_run.done_flags
        if problem is not None:
            self._refusal = CannotBind(Reason.LENGTH_PADDING, f"{said}, {problem}")
        if not otherwise and not padded_run.done_flags:  # a single time may be a cache that grew, or the very first run
            self._compared.add(lengths)


class PaddedCall:
    """A call: its leaves, its rows, its lengths, and the captured length (0 if there is none).

    Args:
        arguments: the positional and the keyword arguments.
        leaves, names, spec: the leaves of the call, their names, and their structure.
        config: the settings, with the dimensions that are lengths, and their padding.
        reader: finds the batch size.

    Raises:
        CannotBind: it has no length, several of one name, or no rows.
    """

    def __init__(
        self,
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        leaves: list[Any],
        names: list[str],
        spec: TreeSpec,
        config: CudaGraphConfig,
        reader: CallReader,
    ) -> None:
        self.arguments, self.leaves, self.spec = arguments, leaves, spec
        self._containers = containers(arguments)
        named = [(index, leaf, _declared(config.length_dims, names[index])) for index, leaf in enumerate(leaves)]
        tensors = [entry for entry in named if entry[2] is not None and issubclass(type(entry[1]), Tensor)]
        places = {index: dim if isinstance(dim, tuple) else (dim, "") for index, _, dim in tensors}
        self.dims = {index: dim for index, (dim, _) in places.items()}
        for index, dim in self.dims.items():
            if not -leaves[index].dim() <= dim < leaves[index].dim():
                shape = tuple(leaves[index].shape)
                raise InputError(f"length_dims[{names[index]!r}] is {dim}, but {names[index]} has shape {shape}.")
        self._pads = {index: _declared(config.pad_values, names[index]) for index in self.dims}
        lengths = {(name, leaves[index].shape[dim]): names[index] for index, (dim, name) in places.items()}
        by_name = dict(sorted(lengths))
        if len(by_name) != max(len(lengths), 1):
            said = ", ".join(f"{name} of {length}" for (_, length), name in lengths.items())
            given = f"length_dims names {', '.join(config.length_dims or ())}; the arguments are {', '.join(names)}"
            raise CannotBind(Reason.BATCH_MISMATCH, said or given)
        self.lengths = tuple(by_name.values())
        self.length = max(self.lengths)
        self.padded = next((length for length in config.lengths or () if length >= self.length), 0)
        device = device_of(leaves)
        on_device = (at for at, leaf in enumerate(leaves) if issubclass(type(leaf), Tensor) and leaf.device == device)
        anchor, batch_dim = reader.anchor(leaves, names, list(on_device))
        self.rows = leaves[anchor].shape[batch_dim]

    @property
    def kind(self) -> Hashable:
        """Return a key of such calls, without their sizes."""
        kinds = ((leaf, type(leaf)) for leaf in self.leaves)
        plain = (leaf if issubclass(kind, ATOMS) and kind not in (int, float) else kind for leaf, kind in kinds)
        tensors = (
            (leaf.dtype, leaf.device, self._one_of(index, leaf)) if issubclass(type(leaf), Tensor) else None
            for index, leaf in enumerate(self.leaves)
        )
        return self.spec, tuple(map(repr, plain)), tuple(tensors)

    @property
    def declares_values(self) -> bool:
        """True if `pad_values` pads the length of a floating argument, such as by a value that is never picked."""
        pads = ((self.leaves[index], pad) for index, pad in self._pads.items())
        return any(pad is not None and leaf.is_floating_point() for leaf, pad in pads)

    def _one_of(self, index: int, leaf: Tensor) -> tuple[bool, ...]:
        """Return which dimensions have one item: mixing rows with the length is right for a single row."""
        length = self.dims[index] % leaf.dim() if index in self.dims and self.lengths[1:] == () else -1
        return tuple(size == 1 and dim != length for dim, size in enumerate(leaf.shape))

    def unlike_in(self, outputs: Any) -> str | None:
        """Describe a change or a return of an argument's container, of which padded calls have copies; None if none."""
        leaves, spec = flatten(self.arguments)
        if spec != self.spec or any(map(operator.is_not, leaves, self.leaves)):
            return "it sets items of an argument"
        passed = set(map(id, self._containers))
        returned = next((container for container in containers(outputs) if id(container) in passed), None)
        return None if returned is None else f"it returns a {type(returned).__name__} that it was passed"

    def at(self, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this length: padded, or cut."""
        leaves = list(self.leaves)
        for index, dim in self.dims.items():
            leaf, pad = leaves[index], self._pads[index]
            more = length - leaf.shape[dim]
            if more < 0:
                leaves[index] = leaf.narrow(dim, 0, length).clone()  # without gaps, as calls of that length have it
            elif more:
                pads = [0, 0] * (leaf.dim() - 1 - dim % leaf.dim()) + [0, more]
                leaves[index] = F.pad(leaf, pads, value=pad if isinstance(pad, (int, float)) else 0)
        args, kwargs = self.spec.unflatten(leaves)
        return args, kwargs


@dataclasses.dataclass(eq=False)
class LengthBuckets:
    """Pads calls of one module to captured lengths.

    The first calls of each kind and captured length, with each state of Python, and later ones from time to time, run
    without padding, after a rehearsal of the padded call. If the results differ, or could differ, such calls run
    eagerly.

    Args:
        config: the settings, with the lengths and their dimensions.
    """

    config: CudaGraphConfig
    _rules: dict[Hashable, OutputLengths] = dataclasses.field(default_factory=dict)
    _reader: CallReader | None = None
    _longest: int = 0  # length that came and that no captured one holds

    def call(self, server: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call."""
        context = CALLS.context
        wants_grad = torch.is_grad_enabled() and any_requires_grad(module.parameters())
        if module.training or wants_grad or (context is not None and context.bypass is not None):
            return server.call(module, args, kwargs)  # which says why it runs eagerly
        try:
            call = self._read(module, args, kwargs)
            if set(call.lengths) == {call.padded}:
                _count(server.stats.lengths, call)
                return server.call(module, args, kwargs)
            rule = self._rule((server.python_state(module), call.kind))
            rule.check()
        except CannotBind as error:
            return server.run_eagerly(module, args, kwargs, error.reason, error.detail)
        sizes = rule.sizes(call.lengths, call.padded)
        if sizes is None or rule.proofs.due(call.padded):
            return self._learn(server, rule, call, module, Reason.FIRST_CALL if sizes is None else Reason.PROOF)
        _count(server.stats.lengths, call)
        leaves, spec = flatten(server.call(module, *call.at(call.padded)))
        return spec.unflatten(cut_outputs(leaves, sizes, dense=self.config.outputs == "clone"))

    def capture_all(
        self, server: Any, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **how: bool
    ) -> CaptureSummary:
        """Capture every batch size at every length, the longest first; `how` is as for runners. Raises InputError."""
        try:
            call = self._read(module, args, kwargs)
        except CannotBind as error:
            raise InputError(f"capture_{'next' if how else 'graphs'} cannot use this call: {error.explained}") from None
        return added(
            {
                f"length {length}": server.capture_all(module, *call.at(length), **how)
                for length in reversed(self.config.lengths or ())
            }
        )

    def _read(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PaddedCall:
        if self._reader is None:
            self._reader = CallReader(module.forward, self.config, argument_rules(module))
        self._reader.use(module.forward)
        call = PaddedCall((args, kwargs), *self._reader.leaves(args, kwargs), self.config, self._reader)
        if not call.padded:
            self._longest = max(self._longest, call.length)
            largest = (self.config.lengths or ())[-1]
            raise CannotBind(Reason.LENGTH_TOO_LARGE, f"the largest is {largest}: add {self._longest} to lengths")
        return call

    def _rule(self, kind: Hashable) -> OutputLengths:
        if kind not in self._rules and len(self._rules) >= MAX_KINDS:
            self._rules.clear()
        return self._rules.setdefault(kind, OutputLengths(self.config.verify))

    def _learn(self, server: Any, rule: OutputLengths, call: PaddedCall, module: Any, why: Reason) -> Any:
        """Run a call eagerly without padding, and compare it with its padded form."""
        device, at = server.device_for(module, call.leaves), call.at(call.padded)
        said = said_of(call.lengths, call.padded)
        server.stats.name = module._get_name()
        server.stats.ran_eagerly(why, size=call.rows)
        try:
            padded = rehearse(module, functools.partial(invoke, module, *at), flatten(at)[0], device)
        except Exception as error:
            rule.refuse(f"{said}, it fails with {type(error).__name__}: {error}")
            with server.running(module):
                return invoke(module, *call.arguments)
        again = flatten(call.at(call.padded))[0]
        written = [
            index for index in call.dims if leaf_difference(padded.arguments[index], again[index], tolerance=EXACT)
        ]
        with server.running(module):
            run = observe_run(module, functools.partial(invoke, module, *call.arguments), device)
        rule.learn(call.lengths, call.padded, run, padded)
        problem = "it writes to an argument that has the length" if written else call.unlike_in(run.outputs)
        problem = problem or unlike_effects(run, padded, chooses=call.declares_values)
        if problem is not None:
            rule.refuse(f"{said}, {problem}")
        return run.outputs


def _count(lengths: collections.Counter[tuple[int, int]], call: PaddedCall) -> None:
    lengths.update([(call.length, call.padded)] * (len(lengths) < _MAX_COUNTED))


def _declared(declared: Mapping[str, Any], name: str) -> Any:
    return next((declared[prefix] for prefix in prefixes(name) if prefix in declared), None)


def unlike_outputs(run: RunEffects, padded_run: RunEffects, changed: str) -> CannotBind | None:
    """Return why the outputs of a call cannot be compared with those of its padded form; None if they can."""
    opaque = unreturnable(run.leaves)
    if opaque is not None:
        return CannotBind(Reason.UNSUPPORTED_OUTPUT, opaque)
    if run.spec != padded_run.spec:
        return CannotBind(Reason.LENGTH_PADDING, f"{changed}, the structure of the outputs changes")
    return None


def unlike_effects(run: RunEffects, padded_run: RunEffects, *, chooses: bool = False) -> str | None:
    """Describe an effect of padding beside the outputs, present or possible; None if there is none.

    Args:
        run: the run without padding.
        padded_run: the run with padding.
        chooses: True if operators may pick values along the length, as a maximum does, since padding is never picked.
    """
    chosen = None if chooses else padded_run.numbers.differing_choice(run.numbers, places=False)
    if chosen is not None:
        return f"{chosen.described} {'picks from' if chosen.made else 'sorts'} the whole length, its padding too"
    return None if all(map(torch.equal, padded_run.drawn, run.drawn)) else "it draws more random numbers"


def grown_dims(leaf: Any, other: Any) -> Sequence[int]:
    """List the dimensions in which the other output is larger; empty if one of the two is not a tensor."""
    if not issubclass(type(leaf), Tensor) or not isinstance(other, Tensor) or leaf.dim() != other.dim():
        return ()
    return [dim for dim in range(leaf.dim()) if leaf.shape[dim] < other.shape[dim]]


def cut_outputs(leaves: Sequence[Any], sizes: Mapping[tuple[int, int], int], *, dense: bool = False) -> list[Any]:
    """Cut outputs; `dense` copies outputs that would have gaps, since eager outputs have none."""
    cut = list(leaves)
    for (index, dim), size in sizes.items():
        cut[index] = cut[index].narrow(dim, 0, size)
    for index in {index for index, _ in sizes} if dense else ():
        if not cut[index].is_contiguous():
            cut[index] = cut[index].clone()
    return cut


def added(summaries: Mapping[str, CaptureSummary]) -> CaptureSummary:
    """Add the summaries of the captures of several kinds of calls."""
    every = summaries.values()
    failed = {f"{label}, {kind}": error for kind, one in summaries.items() for label, error in one.failed.items()}
    captured, seconds, size = (sum(getattr(one, name) for one in every) for name in ("captured", "seconds", "bytes"))
    return CaptureSummary(captured, failed, seconds, size, switched_off=any(one.switched_off for one in every))
