"""One module tried on one set of inputs: eagerly, padded, captured and replayed; it is left as it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.config import CudaGraphConfig
from simplegraph.context import bypassed, outside_calls
from simplegraph.errors import CaptureError, InputError
from simplegraph.graph.breaks.operators import breaking_operators, inlining, recording_breaks
from simplegraph.graph.breaks.trace import BreakTracer
from simplegraph.graph.failures import user_location
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.select import graph_device
from simplegraph.graph.tensors import parts, storage_key, wait_collectives
from simplegraph.manager.jobs import MemoryEstimate
from simplegraph.module.compare import first_difference, random_state, set_random_state
from simplegraph.module.outputs import unreturnable
from simplegraph.module.signature import Arg, CallReader, TensorArg
from simplegraph.module.state import HeldTensor, held_tensors, put_back
from simplegraph.nested import TreeSpec, flatten
from simplegraph.reasons import CannotBind, Reason

# What padding rows are real rows times, in turn: zeros, and more than any real row on either side.
_FILLS = (0, 3, -3)


class ModuleTrial:
    """Tries one module on one set of inputs, and leaves it as it was.

    Args:
        module, args, kwargs: the call to try.
        config: batch dimensions, and operators that break.
        wrapped: wraps the module with that configuration and the settings that it is given.
        before: called with a batch's number before every run and replay of it; metadata is set there.
        number: the batch's own.

    Attributes:
        observed: what an eager run read and wrote; aliases: outputs that share memory with an input or the module.
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
        reader = CallReader(module.forward, config)
        self._leaves, self._names, self._spec = reader.leaves(args, kwargs)
        try:
            self._rows, self._args, _ = reader.read(self._leaves, self._names, self._spec, None)
        except CannotBind as error:
            raise InputError(f"check cannot use these inputs: {error.reason.text} ({error.detail}).") from None
        first = next(leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        self._device = graph_device(first.device)
        self._held = _held(module)
        self._state = {name: part for entry in self._held for name, part in _named_parts(entry)}
        self._saved = {name: tensor.detach().clone() for name, tensor in self._state.items()}
        self._random = random_state(self._device.torch_device)
        self._before = before
        self._number = number
        self._batches = {number: self._leaves}
        self._config = config
        self._wrap = wrapped
        self._observe()

    def _observe(self) -> None:
        """Run once eagerly, to learn what it writes, what its outputs alias, and which breaks it meets."""
        observer = MemoryObserver()
        operators = breaking_operators(self._config.break_ops)
        tracer = BreakTracer(operators, observer, self._device.torch_device)
        leaves = self._fresh(self._leaves)
        try:
            with observer, recording_breaks(tracer):
                outputs, _ = self._run(leaves)
        finally:
            self._restore()
        own = {storage_key(tensor): name for name, tensor in self._state.items()}
        inputs = {storage_key(leaf): name for leaf, name in zip(leaves, self._names, strict=True) if _is_tensor(leaf)}
        self.breaks = list(dict.fromkeys(call.function for call in tracer.finish(outputs).calls))
        self.state_written = tuple(sorted(own[key] for key in observer.written if key in own))
        self.inputs_written = tuple(sorted(inputs[key] for key in observer.written if key in inputs))
        self.output_aliases = tuple(
            f"output {index} ({(own | inputs)[storage_key(leaf)]})"
            for index, leaf in enumerate(outputs)
            if _is_tensor(leaf) and storage_key(leaf) in own | inputs
        )
        self._unreturnable = unreturnable(outputs)

    def also(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare replays on this batch too; False if it needs a graph of its own."""
        leaves, spec = flatten((args, kwargs))
        alike = spec == self._spec and [_form(leaf) for leaf in leaves] == [_form(leaf) for leaf in self._leaves]
        if alike:
            self._batches[number] = leaves
        return alike

    def _run(self, leaves: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
        self._before(self._number)
        args, kwargs = self._spec.unflatten(leaves)
        with bypassed(Reason.NESTED):  # wrapped modules, this one among them, run eagerly
            return flatten(wait_collectives(self._module(*args, **kwargs)))

    def _restore(self) -> None:
        mine = {id(entry.tensor) for entry in self._held}
        put_back([entry for entry in _held(self._module) if id(entry.tensor) not in mine], self._held)
        for name, tensor in self._state.items():
            tensor.detach().copy_(self._saved[name])
        set_random_state(self._device.torch_device, self._random)

    def _eager(self, leaves: Sequence[Any]) -> list[Any]:
        """What eager returns, but for objects that cannot be compared; nothing that it changed stays changed."""
        try:
            outputs, _ = self._run(leaves)
            return self._fresh([leaf for leaf in outputs if unreturnable([leaf]) is None])
        finally:
            self._restore()

    def _fresh(self, leaves: Sequence[Any]) -> list[Any]:
        return [leaf.clone() if _is_tensor(leaf) else leaf for leaf in leaves]

    def mixing(self) -> str | None:
        """'' if padding rows leave real rows alone, what differs if not, None if eager differs from eager."""
        alone = self._eager(self._fresh(self._leaves))
        if first_difference(self._eager(self._fresh(self._leaves)), alone) is not None:
            return None
        fill: list[list[Any]] = []
        for factor in _FILLS:
            try:
                fill.append(self._eager(self._padded(factor)))
            except Exception as error:
                return f"padded to {2 * self._rows} rows it fails: {type(error).__name__}: {error}"
        cut = [[_head(leaf, like) for leaf, like in zip(outputs, alone, strict=True)] for outputs in fill]
        found = (first_difference(padded, alone) for padded in cut)
        return next((difference for difference in found if difference), "")

    def _padded(self, factor: int) -> list[Any]:
        """The inputs with as many rows again: the real ones in another order, numbers times `factor`.

        Indices and masks stay valid: they are zero, or as they were.
        """
        leaves = []
        for leaf, arg in zip(self._leaves, self._args, strict=True):
            if isinstance(arg, TensorArg) and isinstance(arg.batch_dim, int):
                number = leaf.is_floating_point() or leaf.is_complex()
                rest = leaf.flip(arg.batch_dim) * (factor if number else bool(factor))
                leaf = torch.cat([leaf, rest.to(leaf.dtype)], arg.batch_dim)
            leaves.append(leaf.clone() if _is_tensor(leaf) else leaf)
        return leaves

    def problem(self, mode: str = "FULL", inlined: Collection[Any] = ()) -> str | None:
        """What is in the way of a capture, or wrong about its replays; None if nothing is.

        Args:
            mode: FULL captures one graph, with its breaks inline; PIECEWISE honours them.
            inlined: breaks that are captured inline even so.
        """
        if self._unreturnable is not None:
            return f"{Reason.UNSUPPORTED_OUTPUT.text} ({self._unreturnable})."
        wrapped: Any = self._wrap(mode=mode, capture_sizes=[self._rows], padding=False)
        try:
            with inlining(inlined), outside_calls():
                self._capture(wrapped)
                return self._compare(wrapped)
        except (CaptureError, InputError) as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__} at {user_location(error)}: {error}"
        finally:
            wrapped.reset_graphs()
            self._restore()

    def memory(self, sizes: Collection[int]) -> MemoryEstimate:
        """Capture the two largest sizes, measure, and drop them again.

        Raises:
            CaptureError: one of the two cannot be captured.
        """
        wrapped: Any = self._wrap(capture_sizes=sorted(sizes)[-2:])
        try:
            with outside_calls():
                self._capture(wrapped)
            graphs = wrapped.graph_stats.graphs.values()
            first, second = [*(graph.bytes for graph in graphs), 0][:2]
            return MemoryEstimate(len(set(sizes)), first, second)
        finally:
            wrapped.reset_graphs()
            self._restore()

    def _capture(self, wrapped: Any) -> None:
        self._before(self._number)
        args, kwargs = self._spec.unflatten(self._fresh(self._leaves))
        wrapped.capture_graphs(*args, **kwargs)
        self._restore()

    def _compare(self, wrapped: Any) -> str | None:
        """Compare replays with eager on the inputs, and on their rows in another order."""
        first = self._number
        try:
            for turn, number in itertools.product(range(3), self._batches):
                self._number = number
                found = self._difference(wrapped, turn)
                if found is not None:
                    return found
        finally:
            self._number = first
        return None

    def _difference(self, wrapped: Any, turn: int) -> str | None:
        """How a replay differs from eager on one batch, rolled by some rows."""
        leaves = self._batches[self._number]
        values = [_rolled(leaf, arg, turn) for leaf, arg in zip(leaves, self._args, strict=True)]
        self._restore()
        expected, _ = self._run(self._fresh(values))
        expected = self._fresh(expected)
        expected_state = {name: tensor.clone() for name, tensor in self._state.items()}
        self._restore()
        self._before(self._number)
        stats = wrapped.graph_stats
        replays = stats.replays
        args, kwargs = self._spec.unflatten(self._fresh(values))
        outputs, _ = flatten(wrapped(*args, **kwargs))
        if stats.replays == replays:
            reasons = ", ".join(reason.text for reason in stats.eager)
            return f"the call did not replay: {reasons}."
        found = first_difference(outputs, expected)
        if found is not None:
            return f"a replay does not equal eager: {found}. Python state that changes from call to call is frozen."
        for name, tensor in self._state.items():
            found = first_difference([tensor], [expected_state[name]])
            if found is not None:
                return f"after a replay {name} is not what eager leaves: {found}."
        return None


def _held(module: nn.Module) -> list[HeldTensor]:
    """The module's tensors that have an address: parameters, buffers and what ordinary attributes hold."""
    return [
        entry for entry in held_tensors(module) if entry.tensor.layout is torch.strided and not entry.tensor.is_meta
    ]


def _named_parts(entry: HeldTensor) -> list[tuple[str, Tensor]]:
    """The tensors whose memory an entry's is, under its name; numbered where there are several."""
    found = list(parts(entry.tensor))
    return [(entry.name if len(found) == 1 else f"{entry.name}.{index}", part) for index, part in enumerate(found)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _rolled(leaf: Any, arg: Arg, by: int) -> Any:
    if isinstance(arg, TensorArg) and isinstance(arg.batch_dim, int):
        return leaf.roll(by, arg.batch_dim)
    return leaf


def _form(leaf: Any) -> Any:
    """What one graph fixes about an argument."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _head(leaf: Any, like: Any) -> Any:
    """The leading part of `leaf` that has the shape of `like`."""
    if not _is_tensor(leaf) or not _is_tensor(like) or leaf.dim() != like.dim():
        return leaf
    for dim, size in enumerate(like.shape):
        if leaf.shape[dim] > size:
            leaf = leaf.narrow(dim, 0, size)
    return leaf
