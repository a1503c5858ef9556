"""Serve calls of any length by graphs of a few lengths: pad inputs to the next captured length, and cut outputs."""

from __future__ import annotations

import bisect
import collections
import functools
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

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
_MAX_KINDS = 256  # of calls
_MAX_LENGTHS, _MAX_STRIDE, _MAX_COUNTED = 512, 4096, 1 << 16


class PaddedOutputs:
    """Cuts the outputs of padded calls of one kind, as comparisons with calls that are not padded show: base class.

    The first call of each captured length is compared, and later ones at times. Calls have `padded`, the captured
    length, and `said`, which describes the padding.

    Args:
        verify: the setting; with 0, later calls are not compared.

    Attributes:
        refusal: why such calls cannot be padded; None if they can.
    """

    def __init__(self, verify: int) -> None:
        self._first = first_distance(_COST, verify) if verify else 0
        self._calls_until_proof: dict[int, int] = {}  # by captured length
        self._distance: dict[int, int] = {}  # calls between the last comparison and the next; it doubles
        self.refusal: CannotBind | None = None

    def sizes(self, call: Any) -> dict[tuple[int, int], int] | None:
        """Return the sizes that padding changes, by output and dimension; None if they are not known."""
        raise NotImplementedError

    def why_compared(self, call: Any) -> Reason | None:
        """Count a call; return why it must be compared, or None if it can be served padded.

        Raises:
            CannotBind: padding changes the results of such calls.
        """
        if self.refusal is not None:
            raise self.refusal.again()
        if self.sizes(call) is None:
            return Reason.FIRST_CALL
        if self._first:
            self._calls_until_proof[call.padded] = self._calls_until_proof.get(call.padded, 0) - 1
        return Reason.PROOF if self._calls_until_proof.get(call.padded, 0) < 0 else None

    def compare(self, call: Any, rehearsed: Callable[[], RunEffects], observed: Callable[[], RunEffects]) -> Any:
        """Rehearse a padded call, run it without padding, and learn from both; return the latter's outputs.

        Args:
            call: the call.
            rehearsed: runs it padded, and undoes the effects.
            observed: runs it as it is.
        """
        try:
            padded_run = rehearsed()
        except Exception as error:
            run, problem = observed(), f"it fails with {type(error).__name__}: {error}"
            refusal: CannotBind | None = CannotBind(Reason.LENGTH_PADDING, f"{call.said}, {problem}")
        else:
            run = observed()
            refusal = self._learn(call, run, padded_run)
        served = self._distance.get(call.padded, 0)
        self._calls_until_proof[call.padded] = self._distance[call.padded] = 2 * served or self._first
        if refusal is not None and served:
            refusal.detail += f"; it did not {served:,} calls ago, and answers since then may be wrong"
        self.refusal = refusal
        return run.outputs

    def _learn(self, call: Any, run: RunEffects, padded_run: RunEffects) -> CannotBind | None:
        """Learn from a call's outputs and effects; return why such calls cannot be padded."""
        opaque = unreturnable(run.leaves)
        if opaque is not None:
            return CannotBind(Reason.UNSUPPORTED_OUTPUT, opaque)
        other = "the structure of the outputs changes" if run.spec != padded_run.spec else None
        problem = other or self._difference(call, run, padded_run)
        return None if problem is None else CannotBind(Reason.LENGTH_PADDING, f"{call.said}, {problem}")

    def _difference(self, call: Any, run: RunEffects, padded_run: RunEffects) -> str | None:
        """Learn from a call's outputs and effects; describe a change by padding that no cut undoes."""
        raise NotImplementedError


_Outputs = TypeVar("_Outputs", bound=PaddedOutputs)


class CapturedLengths(Generic[_Outputs]):
    """Finds the captured length that holds a call, and how the outputs of such calls are cut.

    Args:
        lengths: the captured lengths.
        new_outputs: makes a `PaddedOutputs` for a new kind of calls.
    """

    def __init__(self, lengths: Sequence[int], new_outputs: Callable[[], _Outputs]) -> None:
        self.lengths, self._new_outputs = sorted(lengths), new_outputs
        self._longest = 0  # length that came and that no captured one holds
        self._kinds: dict[Hashable, _Outputs] = {}

    def holding(self, length: int) -> int:
        """Return the smallest captured length that holds a length. Raises CannotBind."""
        at = bisect.bisect_left(self.lengths, length)
        if at == len(self.lengths):
            self._longest = max(self._longest, length)
            said = f"the largest is {self.lengths[-1]}: add {self._longest} to lengths"
            raise CannotBind(Reason.LENGTH_TOO_LARGE, said)
        return self.lengths[at]

    def outputs(self, kind: Hashable) -> _Outputs:
        """Return what is known of the outputs of such calls."""
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        return self._kinds.setdefault(kind, self._new_outputs())


Lengths = tuple[int, ...]  # of a call, by the names of its lengths


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


class OutputLengths(PaddedOutputs):
    """Cuts the outputs of padded calls of one kind to the sizes that the caller's length gives."""

    def __init__(self, verify: int) -> None:
        super().__init__(verify)
        # By output and dimension, for each of the lengths that it may follow.
        self._sizes: dict[tuple[int, int], list[SizeRule]] = {}
        self._grown: set[tuple[int, int]] = set()  # those that padding changed
        self._otherwise: set[str] = set()  # places below the module where padding changed what the forward left
        self._done_flags: set[str] = set()
        self._sizes_at: dict[Lengths, dict[tuple[int, int], int]] = {}
        self._compared: set[Lengths] = set()
        self._least: dict[int, Lengths] = {}  # by captured length, the least ones that were compared with it

    def sizes(self, call: PaddedCall) -> dict[tuple[int, int], int] | None:
        """Return the sizes that padding changes, by output and dimension; None if they are not known.

        A dimension that did not grow from a shorter length to the captured one does not grow from this length, either.
        """
        lengths, padded = call.lengths, call.padded
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

    def _difference(self, call: PaddedCall, run: RunEffects, padded_run: RunEffects) -> str | None:
        leaves, others, lengths, padded = run.leaves, padded_run.leaves, call.lengths, call.padded
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
        otherwise = padded_run.differing_tensors(run)
        problem = problem or next((f"{name}, which it sets, differs" for name in otherwise & self._otherwise), None)
        self._otherwise |= otherwise
        if padded_run.done_flags and self._done_flags:
            problem = problem or f"it sets {', '.join(sorted(padded_run.done_flags)[:5])}, as it did before"
        self._done_flags |= padded_run.done_flags
        if not otherwise and not padded_run.done_flags:  # a single time may be a cache that grew, or the very first run
            self._compared.add(lengths)
        return problem or call.unlike_in(run.outputs) or unlike_effects(run, padded_run, chooses=call.declares_values)


class PaddedCall:
    """A call: its leaves, its rows, its lengths, and the captured length.

    Args:
        arguments: the positional and the keyword arguments.
        leaves, names, spec: the leaves of the call, their names, and their structure.
        config: the settings, with the dimensions that are lengths, and their padding.
        reader: finds the batch size.
        holding: returns the captured length that holds a length.

    Raises:
        CannotBind: it has no length, several of one name, one that no captured length holds, or no rows.
    """

    def __init__(
        self,
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
        leaves: list[Any],
        names: list[str],
        spec: TreeSpec,
        config: CudaGraphConfig,
        reader: CallReader,
        holding: Callable[[int], int],
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
        device = device_of(leaves)
        on_device = (at for at, leaf in enumerate(leaves) if issubclass(type(leaf), Tensor) and leaf.device == device)
        anchor, batch_dim = reader.anchor(leaves, names, list(on_device))
        self.rows = leaves[anchor].shape[batch_dim]
        self.padded = holding(self.length)
        self._writes = False  # to an argument that has the length

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
    def said(self) -> str:
        """Describe the padding: the lengths, and the captured length."""
        return f"from {' and '.join(map(str, self.lengths))} to {self.padded}"

    @property
    def declares_values(self) -> bool:
        """True if `pad_values` pads the length of a floating argument, such as by a value that is never picked."""
        pads = ((self.leaves[index], pad) for index, pad in self._pads.items())
        return any(pad is not None and leaf.is_floating_point() for leaf, pad in pads)

    def _one_of(self, index: int, leaf: Tensor) -> tuple[bool, ...]:
        """Return which dimensions have one item: mixing rows with the length is right for a single row."""
        length = self.dims[index] % leaf.dim() if index in self.dims and self.lengths[1:] == () else -1
        return tuple(size == 1 and dim != length for dim, size in enumerate(leaf.shape))

    def rehearse(self, module: Any, device: torch.device) -> RunEffects:
        """Run a module on the padded call, and undo the effects."""
        args, kwargs = self.at(self.padded)
        padded = flatten((args, kwargs))[0]
        run = rehearse(module, functools.partial(invoke, module, args, kwargs), padded, device)
        again = flatten(self.at(self.padded))[0]
        self._writes = any(leaf_difference(run.arguments[at], again[at], tolerance=EXACT) for at in self.dims)
        return run

    def unlike_in(self, outputs: Any) -> str | None:
        """Describe a change or a return of an argument, of which padded calls have copies; None if there is none."""
        if self._writes:
            return "it writes to an argument that has the length"
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
                leaves[index] = padded_leaf(leaf, dim, more, pad if isinstance(pad, (int, float)) else 0)
        args, kwargs = self.spec.unflatten(leaves)
        return args, kwargs


class LengthBuckets:
    """Pads calls of one module to captured lengths.

    The first calls of each kind and captured length, with each state of Python, and later ones from time to time, run
    without padding, after a rehearsal of the padded call. If the results differ, or could differ, such calls run
    eagerly.

    Args:
        config: the settings, with the lengths and their dimensions.
    """

    def __init__(self, config: CudaGraphConfig) -> None:
        self.config = config
        self._captured = CapturedLengths(config.lengths or (), functools.partial(OutputLengths, config.verify))
        self._reader: CallReader | None = None

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
            rule = self._captured.outputs((server.python_state(module), call.kind))
            why = rule.why_compared(call)
        except CannotBind as error:
            return server.run_eagerly(module, args, kwargs, error.reason, error.detail)
        if why is not None:
            return self._compare(server, rule, call, module, why)
        _count(server.stats.lengths, call)
        leaves, spec = flatten(server.call(module, *call.at(call.padded)))
        return spec.unflatten(cut_outputs(leaves, rule.sizes(call) or {}, dense=self.config.outputs == "clone"))

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
                for length in reversed(self._captured.lengths)
            }
        )

    def _read(self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PaddedCall:
        if self._reader is None:
            self._reader = CallReader(module.forward, self.config, argument_rules(module))
        self._reader.use(module.forward)
        leaves = self._reader.leaves(args, kwargs)
        return PaddedCall((args, kwargs), *leaves, self.config, self._reader, self._captured.holding)

    def _compare(self, server: Any, rule: OutputLengths, call: PaddedCall, module: Any, why: Reason) -> Any:
        """Run a call eagerly without padding, and compare it with its padded form."""
        device = server.device_for(module, call.leaves)
        server.stats.name = module._get_name()
        server.stats.ran_eagerly(why, size=call.rows)

        def observed() -> RunEffects:
            with server.running(module):
                return observe_run(module, functools.partial(invoke, module, *call.arguments), device)

        return rule.compare(call, functools.partial(call.rehearse, module, device), observed)


def _count(lengths: collections.Counter[tuple[int, int]], call: PaddedCall) -> None:
    lengths.update([(call.length, call.padded)] * (len(lengths) < _MAX_COUNTED))


def _declared(declared: Mapping[str, Any], name: str) -> Any:
    return next((declared[prefix] for prefix in prefixes(name) if prefix in declared), None)


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


def padded_leaf(leaf: Tensor, dim: int, more: int, value: float = 0) -> Tensor:
    """Pad a dimension of a tensor at its end with `more` values."""
    return F.pad(leaf, [0, 0] * (leaf.dim() - 1 - dim % leaf.dim()) + [0, more], value=value)


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
