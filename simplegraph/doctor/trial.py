"""Tries one module on one set of inputs: eager, padded, captured and replayed. Its state is restored."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.break_operators import breaking_operators, inlining, recording_breaks
from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.context import bypassed, outside_calls
from simplegraph.base.errors import CaptureError, InputError
from simplegraph.base.failures import user_location
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import has_address, parts, storage_key, wait_collectives
from simplegraph.call.args import batch_dim_of, known_arguments
from simplegraph.call.outputs import unreturnable
from simplegraph.call.signature import CallReader
from simplegraph.device.generators import HostRandom, default_generator, put_random_states, random_states
from simplegraph.device.select import graph_device
from simplegraph.guard.survey import HeldTensor, held_tensors
from simplegraph.manager.differences import cloned, first_difference
from simplegraph.manager.jobs import CaptureSummary, MemoryEstimate
from simplegraph.program.breaks.eager import BreakTracer
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.snapshot import Snapshot

# Padding rows are real rows times each of these factors: zeros, and values larger than any real one, of either sign.
_FILLS = (0, 3, -3, 100)
TRIED = (
    "twice the rows, padded with zeros and with rows times 3, -3 and 100, and half of the rows gave the same answers, "
    "also for copies of the first row. Rows that depend on each other only for other data were not found"
)


class ModuleTrial:
    """Tries one module on one set of inputs, and restores its state.

    Args:
        module, args, kwargs: the call to try.
        config: batch dimensions, and operators that break.
        wrapped: wraps the module with that configuration and further settings.
        before: called with a batch's number before each of its runs and replays, to set metadata.
        number: this batch's number.

    Attributes:
        state_written, inputs_written: names of state and of arguments that an eager run wrote to.
        output_aliases: outputs that share memory with an argument or with the module.
        breaks: the functions and operators that broke.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: CudaGraphConfig,
        wrapped: Callable[..., Any],
        before: Callable[[int], object] = bool,
        number: int = 0,
    ):
        self._module = module
        reader = CallReader(module.forward, config, known_arguments(module))
        self._leaves, self._names, self._spec = reader.leaves(args, kwargs)
        try:
            self._rows, self._args, _ = reader.read(self._leaves, self._names, self._spec, ())
        except CannotBind as error:
            raise InputError(f"check cannot use these inputs: {error.explained}") from None
        first = next(leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        self._device = graph_device(first.device)
        self._before_all = Snapshot(module)
        held = (entry for entry in held_tensors(module) if has_address(entry.tensor))
        self._state = {name: part for entry in held for name, part in _named_parts(entry)}
        self._saved = {name: tensor.detach().clone() for name, tensor in self._state.items()}
        self._generators = (default_generator(self._device.torch_device),)
        self._random, self._host_random = random_states(self._generators), HostRandom()
        self._before = before
        self._number = number
        self._batches = {number: self._leaves}
        self._config = config
        self._wrap = wrapped
        self._observe()

    def _observe(self) -> None:
        """Run once eagerly, to find what the forward writes, what its outputs alias, and its breaks."""
        observer = MemoryObserver()
        operators = breaking_operators()
        tracer = BreakTracer(operators, observer, self._device.torch_device)
        leaves = cloned(self._leaves)
        try:
            with observer, recording_breaks(tracer):
                outputs, _ = self._run(leaves)
        finally:
            self._restore()
        own = {storage_key(tensor): name for name, tensor in self._state.items()}
        named = zip(leaves, self._names, strict=True)
        inputs = {storage_key(leaf): name for leaf, name in named if isinstance(leaf, Tensor)}
        self.breaks = list(dict.fromkeys(call.function for call in tracer.finish(outputs).calls))
        self.state_written, self.inputs_written = (
            tuple(sorted(names[key] for key in observer.written if key in names)) for names in (own, inputs)
        )
        self.output_aliases = tuple(
            f"output {index} ({(own | inputs)[storage_key(leaf)]})"
            for index, leaf in enumerate(outputs)
            if isinstance(leaf, Tensor) and storage_key(leaf) in own | inputs
        )
        self._unreturnable = unreturnable(outputs)

    def add_batch(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Add a batch to compare replays on; False, without adding it, if it needs another graph."""
        leaves, spec = flatten((args, kwargs))
        alike = spec == self._spec and [_form(leaf) for leaf in leaves] == [_form(leaf) for leaf in self._leaves]
        if alike:
            self._batches[number] = leaves
        return alike

    def _run(self, leaves: Sequence[Any], number: int | None = None) -> tuple[list[Any], TreeSpec]:
        self._before(self._number if number is None else number)
        args, kwargs = self._spec.unflatten(leaves)
        with bypassed(Reason.NESTED):  # wrapped modules, this one among them, run eagerly
            return flatten(wait_collectives(self._module(*args, **kwargs)))

    def _restore(self) -> None:
        self._before_all.put_back()
        for name, tensor in self._state.items():
            tensor.detach().copy_(self._saved[name])
        put_random_states(self._generators, self._random)
        self._host_random.put_back()

    def _eager(self, leaves: Sequence[Any]) -> list[Any]:
        """Run eagerly and return the outputs that can be compared; the module's state is restored."""
        try:
            outputs, _ = self._run(cloned(leaves))
            return cloned([leaf for leaf in outputs if unreturnable([leaf]) is None])
        finally:
            self._restore()

    def mixing(self) -> str | None:
        """Return '' if padding rows do not change real rows, else what differs; None if two eager runs differ."""
        if first_difference(self._eager(self._leaves), self._eager(self._leaves)) is not None:
            return None
        found = self._mixed(self._leaves) or self._mixed(self._part(self._leaves, [0] * self._rows))
        return found or ""

    def _mixed(self, leaves: Sequence[Any]) -> str | None:
        """Say how the rows of a batch differ if it is padded to twice its rows or cut to half of them, or None."""
        alone, half = self._eager(leaves), self._rows // 2
        tried = [(2 * self._rows, self._padded(leaves, factor)) for factor in _FILLS]
        tried += [(half, self._part(leaves, range(half)))] if half else []
        for rows, other in tried:
            try:
                outputs = self._eager(other)
            except Exception as error:
                return f"it fails with {rows} rows: {type(error).__name__}: {error}"
            if len(outputs) != len(alone):
                return f"it returns {len(outputs)} values for {rows} rows, and {len(alone)} for {self._rows}"
            pairs = list(zip(outputs, alone, strict=True))
            found = first_difference([_head(*pair) for pair in pairs], [_head(*pair[::-1]) for pair in pairs])
            if found is not None:
                return found
        return None

    def _part(self, leaves: Sequence[Any], rows: Iterable[int]) -> list[Any]:
        """Take some rows of inputs."""
        index = torch.tensor(list(rows))
        dims = map(batch_dim_of, self._args)
        pairs = zip(leaves, dims, strict=True)
        return [leaf if dim is None else leaf.index_select(dim, index.to(leaf.device)) for leaf, dim in pairs]

    def _padded(self, leaves: Sequence[Any], factor: int) -> list[Any]:
        """Double the rows of inputs: padding is the real rows in reverse, floating-point ones times `factor`.

        Indices and masks stay valid: in padding they are zero, or those of real rows.
        """
        padded = []
        for leaf, arg in zip(leaves, self._args, strict=True):
            dim = batch_dim_of(arg)
            if dim is not None:
                number = leaf.is_floating_point() or leaf.is_complex()
                rest = leaf.flip(dim) * (factor if number else bool(factor))
                leaf = torch.cat([leaf, rest.to(leaf.dtype)], dim)
            padded.append(leaf)
        return padded

    def problem(self, mode: str = "FULL", inlined: Collection[Any] = ()) -> str | None:
        """Say what prevents a capture, or is wrong about its replays; None if nothing is.

        Args:
            mode: FULL captures one graph, with its breaks inline; PIECEWISE runs them eagerly.
            inlined: breaks that are captured inline nevertheless.
        """
        if self._unreturnable is not None:
            reason = Reason.UNSUPPORTED_OUTPUT
            return f"{reason.text} ({self._unreturnable}). See {reason.link}"
        wrapped: Any = self._wrap(mode=mode, capture_sizes=[self._rows], padding=False)
        try:
            with inlining(inlined), self._capture(wrapped):
                rounds = itertools.product(range(3), self._batches)
                return next(filter(None, (self._difference(wrapped, *each) for each in rounds)), None)
        except (CaptureError, InputError) as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__} at {user_location(error)}: {error}"

    def memory(self, sizes: Collection[int]) -> MemoryEstimate:
        """Capture the sizes, measure their memory, and drop their graphs.

        Raises:
            ConfigError: the sizes are invalid.
            CaptureError: one of them cannot be captured.
        """
        wrapped: Any = self._wrap(capture_sizes=list(sizes))
        with self._capture(wrapped) as summary:
            taken = [graph.bytes for graph in wrapped.graph_stats.graphs.values()]
            return MemoryEstimate.measured(self._device, taken, summary.bytes)

    @contextlib.contextmanager
    def _capture(self, wrapped: Any) -> Iterator[CaptureSummary]:
        """Capture the wrapped module; afterwards its graphs are dropped and its state is restored."""
        try:
            with outside_calls():
                self._before(self._number)
                args, kwargs = self._spec.unflatten(cloned(self._leaves))
                summary = wrapped.capture_graphs(*args, **kwargs)
                self._restore()
                yield summary
        finally:
            wrapped.reset_graphs()
            self._restore()

    def _difference(self, wrapped: Any, turn: int, number: int) -> str | None:
        """Say how a replay differs from eager on one batch with its rows rolled by `turn`; None if it does not."""
        pairs = [(leaf, batch_dim_of(arg)) for leaf, arg in zip(self._batches[number], self._args, strict=True)]
        values = [leaf if dim is None else leaf.roll(turn, dim) for leaf, dim in pairs]
        self._restore()
        expected, _ = self._run(cloned(values), number)
        expected, expected_state = cloned(expected), cloned(list(self._state.values()))
        self._restore()
        self._before(number)
        stats = wrapped.graph_stats
        replays = stats.replays
        args, kwargs = self._spec.unflatten(cloned(values))
        outputs, _ = flatten(wrapped(*args, **kwargs))
        if stats.replays == replays:
            reasons = ", ".join(reason.text for reason in stats.eager)
            links = " ".join(reason.link for reason in stats.eager)
            return f"the call did not replay: {reasons}. See {links}"
        found = first_difference(outputs, expected)
        if found is not None:
            return f"a replay does not equal eager: {found}. Python state that changes from call to call is frozen."
        for (name, tensor), expected_tensor in zip(self._state.items(), expected_state, strict=True):
            found = first_difference([tensor], [expected_tensor])
            if found is not None:
                return f"after a replay {name} differs from eager's: {found}."
        return None


def _named_parts(entry: HeldTensor) -> list[tuple[str, Tensor]]:
    """Name the plain tensors that an entry consists of, after the entry; numbered if there are several."""
    found = list(parts(entry.tensor))
    return [(entry.name if len(found) == 1 else f"{entry.name}.{index}", part) for index, part in enumerate(found)]


def _form(leaf: Any) -> Any:
    """Return the properties of an argument that one graph is captured for."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _head(leaf: Any, like: Any) -> Any:
    """Return the leading part of `leaf` that has the shape of `like`."""
    if not isinstance(leaf, Tensor) or not isinstance(like, Tensor) or leaf.dim() != like.dim():
        return leaf
    return leaf[tuple(map(slice, like.shape))]
