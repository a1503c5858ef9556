"""`check`: whether a module can be captured, and what would be wrong about it if it were."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.batch.reasons import Reason
from simplegraph.config import CudaGraphConfig
from simplegraph.context import bypassed
from simplegraph.errors import CaptureError, InputError
from simplegraph.graph.breaks.operators import breaking_operators, recording_breaks
from simplegraph.graph.breaks.recorder import BreakTrace
from simplegraph.graph.failures import user_location
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.program import Program
from simplegraph.graph.select import graph_device
from simplegraph.graph.session import CaptureSession
from simplegraph.graph.tensors import parts, storage_key, wait_collectives
from simplegraph.module.compare import first_difference, random_state, set_random_state
from simplegraph.module.outputs import unreturnable
from simplegraph.module.signature import Arg, CallReader, CannotBind, TensorArg
from simplegraph.module.state import HeldTensor, held_tensors, kept_in_graph, put_back
from simplegraph.nested import TreeSpec, flatten

# What padding rows are real rows times, in turn: zeros, and more than any real row on either side.
_FILLS = (0, 3, -3)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """What `check` found. True in a condition if the module can be captured and padded as it is.

    Attributes:
        capturable: the forward was captured, and its replays equal eager on new inputs.
        problem: what is in the way of that, with the user's line; None if nothing is.
        rows_independent: padding rows do not change real ones; None if not even two eager runs agree.
        mixing: what differed, where they do.
        state_written: names of parameters, buffers and attributes the forward writes to: every replay
            changes them again, as every eager call does.
        inputs_written: arguments that the forward writes to.
        output_aliases: outputs that share memory with an argument or with the module.
    """

    capturable: bool
    problem: str | None
    rows_independent: bool | None
    mixing: str | None
    state_written: tuple[str, ...]
    inputs_written: tuple[str, ...]
    output_aliases: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.capturable and self.rows_independent is not False

    def __str__(self) -> str:
        lines = ["capturable: " + ("yes" if self.capturable else f"no\n  {self.problem}")]
        if self.rows_independent is None:
            lines.append("rows independent: cannot be said, since two eager runs on the same inputs differ")
        elif self.rows_independent:
            lines.append("rows independent: yes, padding is safe")
        else:
            lines.append(f"rows independent: no ({self.mixing}); use padding=False, which captures exact sizes only")
        for title, names in (
            ("writes its own state", self.state_written),
            ("writes its inputs", self.inputs_written),
            ("outputs that alias", self.output_aliases),
        ):
            if names:
                lines.append(f"{title}: {', '.join(names)}")
        return "\n".join(lines)


def check(module: nn.Module, *args: Any, batch_dims: Mapping[str, Any] | None = None, **kwargs: Any) -> CheckReport:
    """Try whether a module can be captured, and whether padding its batch would change its answers.

    Runs the forward several times eagerly (as called, and padded with three different contents), captures
    it, and compares replays with eager on new inputs. What the module holds is put back afterwards, and so is
    the default random generator.

        report = sg.check(model, input_ids, positions)
        print(report)

    Args:
        module: in evaluation mode.
        *args: example inputs, of a batch size that is not the size of another dimension. The batch is dimension 0
            of the first tensor unless `batch_dims` says otherwise.
        batch_dims: batch dimensions by argument name, as in `CudaGraphConfig`.
        **kwargs: example inputs passed by keyword.

    Raises:
        InputError: it is no module, or in training mode, or these inputs cannot be bound to a graph.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"check got a {type(module).__name__}; expected a torch.nn.Module instance first.")
    if module.training:
        raise InputError("the module is in training mode; call .eval() before check.")
    with torch.no_grad(), bypassed(Reason.NESTED):
        return ModuleTrial(module, args, kwargs, CudaGraphConfig(batch_dims=batch_dims or {})).report()


class ModuleTrial:
    """Tries one module on one set of inputs, and leaves it as it was.

    Args:
        module, args, kwargs: the call to try.
        config: batch dimensions, and operators that break.
        before: called with a batch's number before every run and replay of it; metadata is set there.
        number: the batch's own.
    """

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: CudaGraphConfig,
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
        self._break_ops = config.break_ops

    def also(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compare replays on this batch too; False if it needs a graph of its own."""
        leaves, spec = flatten((args, kwargs))
        alike = spec == self._spec and [_form(leaf) for leaf in leaves] == [_form(leaf) for leaf in self._leaves]
        if alike:
            self._batches[number] = leaves
        return alike

    def report(self) -> CheckReport:
        observer = MemoryObserver()
        leaves = self._fresh(self._leaves)
        with observer:
            outputs, _ = self._run(leaves)
        own = {storage_key(tensor): name for name, tensor in self._state.items()}
        inputs = {storage_key(leaf): name for leaf, name in zip(leaves, self._names, strict=True) if _is_tensor(leaf)}
        aliases = tuple(
            f"output {index} ({(own | inputs)[storage_key(leaf)]})"
            for index, leaf in enumerate(outputs)
            if _is_tensor(leaf) and storage_key(leaf) in own | inputs
        )
        self._restore()
        mixing = self._mixing()
        problem = self.problem()
        return CheckReport(
            problem is None,
            problem,
            None if mixing is None else mixing == "",
            mixing or None,
            tuple(sorted(own[key] for key in observer.written if key in own)),
            tuple(sorted(inputs[key] for key in observer.written if key in inputs)),
            aliases,
        )

    def _run(self, leaves: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
        self._before(self._number)
        args, kwargs = self._spec.unflatten(leaves)
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

    def _mixing(self) -> str | None:
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

    def trace(self, inlined: frozenset[Any] = frozenset()) -> BreakTrace:
        """Which eager breaks a run meets, but for those that are to be captured inline, and what they return."""
        observer = MemoryObserver()
        trace = BreakTrace(breaking_operators(self._break_ops), observer, self._device.torch_device, inlined)
        with observer, recording_breaks(trace):
            outputs = self._run(self._fresh(self._leaves))
        trace.finish(outputs)
        self._restore()
        return trace

    def problem(self, inlined: frozenset[Any] | None = None) -> str | None:
        """What is in the way of a capture, or wrong about its replays; None if nothing is.

        Args:
            inlined: breaks to capture inline, in a piecewise capture; None captures one full graph.
        """
        static = self._fresh(self._leaves)
        pool = self._device.new_pool()
        program: Program | None = None
        try:
            trace = None if inlined is None else self.trace(inlined)
            outputs, _ = self._run(static)  # a warmup, as before every capture
            self._restore()
            detail = unreturnable(outputs)
            if detail is not None:
                return f"{Reason.UNSUPPORTED_OUTPUT.text} ({detail})."
            _copy(static, self._leaves)
            with CaptureSession(self._device, pool, thorough=False) as session:
                label = f"batch size {self._rows}"
                program = session.capture(lambda: self._unflat(static), label=label, trace=trace)
            kept = [entry.name for entry in kept_in_graph(self._module, self._device, pool)]
            if kept:
                return (
                    f"{', '.join(kept)} would keep a tensor that exists only inside the graph. "
                    "Return it instead, or copy it into a buffer of the module."
                )
            return self._compare(program, static)
        except CaptureError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__} at {user_location(error)}: {error}"
        finally:
            self._device.synchronize()
            if program is not None:
                program.drop()
            self._device.release_pool(pool)
            self._restore()

    def _unflat(self, static: Sequence[Any]) -> Any:
        args, kwargs = self._spec.unflatten(static)
        return self._module(*args, **kwargs)

    def _compare(self, program: Program, static: list[Any]) -> str | None:
        """Replay and eager on the inputs, and on their rows in another order."""
        first = self._number
        try:
            for turn, number in itertools.product(range(3), self._batches):
                self._number = number
                found = self._difference(program, static, turn)
                if found is not None:
                    return found
        finally:
            self._number = first
        return None

    def _difference(self, program: Program, static: list[Any], turn: int) -> str | None:
        """How a replay differs from eager on one batch, rolled by some rows."""
        leaves = self._batches[self._number]
        values = [_rolled(leaf, arg, turn) for leaf, arg in zip(leaves, self._args, strict=True)]
        self._restore()
        expected, _ = self._run(self._fresh(values))
        expected = self._fresh(expected)
        expected_state = {name: tensor.clone() for name, tensor in self._state.items()}
        self._restore()
        _copy(static, values)
        self._before(self._number)
        program.replay()
        found = first_difference(program.outputs, expected)
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


def _copy(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if _is_tensor(target):
            target.copy_(source)


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
