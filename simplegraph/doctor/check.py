"""`check`: tries if a module can be captured, as one graph or in pieces, and if padding changes its outputs."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.context import bypassed, outside_calls
from simplegraph.base.errors import CaptureError, InputError, VerificationError
from simplegraph.base.failures import FailingPart, user_location
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import has_address, parts, storage_key, wait_collectives
from simplegraph.base.walk import names_in
from simplegraph.call.inputs import HostInput, batch_dim_of
from simplegraph.call.outputs import unreturnable
from simplegraph.call.rehearsals import Undo
from simplegraph.call.signature import CallReader, argument_rules, device_of
from simplegraph.device.saved_state import SavedMemory, default_generator
from simplegraph.device.select import graph_device
from simplegraph.doctor.parts_to_break import Obstacle, find_parts
from simplegraph.doctor.trials import TrialConfig
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.survey import HeldTensor, device_of_state, held_tensors
from simplegraph.guard.values import shown_entry, value_key
from simplegraph.manager.manager import MemoryEstimate
from simplegraph.manager.replay_proof import Effects, cloned, first_difference
from simplegraph.manager.stats import CaptureSummary
from simplegraph.program.breaks.break_calls import BreakTrace, ResultChanged, same_results
from simplegraph.program.breaks.eager import BreakTracer
from simplegraph.program.breaks.marks import breaking_operators, inlining, name_of, recording_breaks
from simplegraph.program.index_checks import IndexChecks
from simplegraph.program.observe import MemoryObserver, NumbersBySize, NumbersSeen
from simplegraph.serve.graphed_function import GraphedFunction, check_function
from simplegraph.serve.wrap import wrap

logger = logging.getLogger("simplegraph")

# Padding rows are real rows times each of these factors: zeros, and values larger than all real values, of both signs.
_FILLS = (0, 3, -3, 100)
_VARIES = "returns results of another shape, or another number, for other inputs"
_FOLLOWS = "leave out what follows the batch size"
_TRIED = (
    "answers and writes stayed the same with half of the rows and with twice the rows (padding: zeros, and rows times "
    "3, -3 and 100), also for copies of the first row; dependence that only other data show is not found"
)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The findings of `check`. True as a condition if the module can be captured and padded without changes.

    Attributes:
        capturable: True if the forward was captured as one full graph, with its eager breaks inline, and its replays
            equal eager on new inputs.
        problem: why it is not capturable, with the user's line; None if it is.
        breaks: function that breaks -> the problem of capturing it inline; None if there is none.
        piecewise: the problem that remains with all breaks run eagerly; None if there is none.
        rows_independent: True if the tried padding changed no real row; None if two eager runs already differ.
        mixing: the change that padding made; None if there was none.
        state_written: names of parameters, buffers and attributes that the forward writes to: every replay
            changes them again, as every eager call does.
        inputs_written: names of arguments that the forward writes to.
        output_aliases: outputs that share memory with an argument or with the module.
        memory: the memory that capturing `capture_sizes` would take; None if they were not given.
        break_at: the breaks with which it can be captured, found by trying: "model", or the name of a module in a
            function's code -> patterns for `break_at`. Empty if no break is needed, or if the whole would have to be
            one.
        counts: numbers, flags and texts in attributes that forwards name, by class, with their values: each further
            value needs a graph of its own.
    """

    capturable: bool
    problem: str | None
    breaks: dict[str, str | None]
    piecewise: str | None
    rows_independent: bool | None
    mixing: str | None
    state_written: tuple[str, ...]
    inputs_written: tuple[str, ...]
    output_aliases: tuple[str, ...]
    memory: MemoryEstimate | None = None
    counts: tuple[str, ...] = ()
    break_at: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.capturable and self.rows_independent is not False

    def __str__(self) -> str:
        independent = {
            None: "unknown, since two eager runs on the same inputs differ",
            True: f"yes, as far as these inputs show: {_TRIED}",
            False: (
                f"no ({self.mixing}); use padding=False, which captures exact sizes only. See: "
                f"{Reason.PADDING_SHOWS.command}"
            ),
        }
        lines = [*self._capture_lines(), f"rows independent: {independent[self.rows_independent]}"]
        if self.mixing is not None and self.mixing.endswith(_FOLLOWS):
            lines[-1] = f"not padded: {self.mixing}. See: {Reason.OUTPUT_SHAPE_UNKNOWN.command}"
        lists = self.state_written, self.inputs_written, self.output_aliases, self.counts
        titles = "writes its own state", "writes its inputs", "outputs that alias", "values that graphs depend on"
        lines += [f"{title}: {', '.join(names)}" for title, names in zip(titles, lists, strict=True) if names]
        if self.memory is not None:
            lines.append(str(self.memory))
        return "\n".join(lines)

    def _capture_lines(self) -> list[str]:
        if self.capturable:
            return ["capturable: yes" + (", as one full graph: use mode='FULL'" if self.breaks else "")]
        if self.break_at:
            calls = ", ".join(itertools.starmap(_break_call, self.break_at.items()))
            problem = _without_advice(str(self.piecewise))
            return [f"capturable: piecewise, by {calls} and mode='PIECEWISE'", f"  {problem}"]
        if self.piecewise == self.problem:
            return [f"capturable: no\n  {self.problem}"]
        if self.piecewise is not None:
            problem = _without_advice(str(self.problem))
            return [f"capturable: no\n  {problem}", f"  not piecewise either: {self.piecewise}"]
        guilty = {name: problem for name, problem in self.breaks.items() if problem is not None}
        lines = ["capturable: piecewise, not as one full graph"]
        lines += [f"  {name} must stay an eager break: {_without_advice(problem)}" for name, problem in guilty.items()]
        lines += [f"  {name} could be captured" for name in self.breaks if name not in guilty]
        return lines if guilty else [*lines, f"  all breaks together: {self.problem}"]


def check(
    module: nn.Module | Callable[..., Any],
    *args: Any,
    others: Sequence[tuple[Any, ...]] = (),
    before: Callable[[int], object] | None = None,
    batch_dims: Mapping[str, Any] | None = None,
    capture_sizes: Collection[int] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Try if a module or function can be captured, in one graph or in pieces, and if padding would change its outputs.

    The forward runs eagerly several times: as called, padded with different contents, on half of the rows, and the same
    with copies of the first row. Then it is captured, and replays are compared with eager on new inputs.

    It also runs, as called and padded, with other values in memory of the module that the forward writes. This shows
    writes of values that were there already, such as zeros to an empty slot of a cache. Other code must not use this
    memory meanwhile.

    If a module with eager breaks cannot be one full graph, each break is tried inline separately, to find those that
    prevent it. If not even pieces can be captured, the failing parts are made eager breaks one after another, each
    extended to the parts around it until its results have one form for all inputs. The module, its state and the
    default random generator are restored afterwards; other memory that breaks write (a KV cache in a context) is not.

        report = sg.check(model, input_ids, positions)
        print(report)

    Args:
        module: the module, in evaluation mode, with its breaks marked; or a function or method, as for `wrap`.
        *args: example inputs, with a batch size that no other dimension has. The batch is dimension 0 of the first
            tensor unless `batch_dims` says otherwise.
        others: further batches, each a tuple of positional arguments, such as sequences of other lengths. Batches with
            the same shapes share a graph; replays are compared on each batch.
        before: called with the batch's number (0 for `args`) before each run and replay of the batch, to set metadata
            that breaks read.
        batch_dims: batch dimensions by argument name, as in `CudaGraphConfig`.
        capture_sizes: batch sizes whose graphs' memory is to be measured, by capturing them.
        **kwargs: example inputs passed by keyword, for every batch.

    Raises:
        ConfigError: `module` is a function of a kind that `wrap` refuses.
        InputError: `module` is no module, function or method, or is in training mode; or the inputs cannot be bound to
            a graph, or have names of settings.
        CaptureError: `capture_sizes` was given, and one of the sizes cannot be captured.
    """
    if not isinstance(module, nn.Module):
        module = _module_of(module)
    if module.training:
        raise InputError("the module is in training mode; call .eval() before check.")
    if not all(isinstance(other, tuple) for other in others):
        raise InputError("check got others that are not tuples of positional arguments, such as [(x2,), (x3,)].")
    settings = (
        kwargs.keys() & CudaGraphConfig.__dataclass_fields__.keys() - inspect.signature(module.forward).parameters
    )
    if settings:
        raise InputError(
            f"check got {', '.join(sorted(settings))}, which the forward does not take; settings are wrap's."
        )
    config = TrialConfig(
        batch_dims=batch_dims or {},
        on_capture_failure="raise",
        verify=1,
        progress=False,
    )
    with torch.no_grad(), Undo(None, ()) as undo:
        undo.watch(module)
        trials: list[ModuleTrial] = []
        for number, batch in enumerate([args, *others]):
            if not any(trial.add_batch(number, batch, kwargs) for trial in trials):
                trials.append(ModuleTrial(module, batch, kwargs, config, before or bool, number))
        return dataclasses.replace(
            _report(module, trials, capture_sizes), counts=tuple(dict.fromkeys(_counting(module)))
        )


def _module_of(function: Any) -> FunctionModule:
    """Make a module of a function, as `wrap` does."""
    if isinstance(function, GraphedFunction):
        function = vars(function)["__wrapped__"]
    if isinstance(function, type) or not callable(function):
        raise InputError(f"check got {function!r}; expected a torch.nn.Module instance, a function or a method first.")
    check_function(function, "check")
    module = FunctionModule(function)
    module.resolve()
    return module


def _report(module: nn.Module, trials: Sequence[ModuleTrial], capture_sizes: Collection[int] | None) -> CheckReport:
    first = trials[0]
    # Measure memory first: the first capture also allocates the memory that libraries keep for the capture stream.
    memory = None if capture_sizes is None else first.memory(capture_sizes)
    mixing = first.mixing()
    for trial in trials[1:] if mixing == "" else ():
        mixing = trial.mixing() or mixing
    problem = _problem(trials)
    functions = list(dict.fromkeys(function for trial in trials for function in trial.breaks))
    piecewise = _problem(trials, "PIECEWISE") if functions else problem
    parts: dict[str, tuple[str, ...]] = {}
    if piecewise is not None:
        parts, remaining_problem = find_parts(
            module, lambda: next(filter(None, (trial.obstacle() for trial in trials)), None)
        )
        piecewise = remaining_problem or piecewise
    breaks: dict[str, str | None] = {name_of(function): None for function in functions}
    if problem is not None and piecewise is None:
        breaks = {name_of(function): _problem(trials, "PIECEWISE", [function]) for function in functions}
    return CheckReport(
        problem is None,
        problem,
        breaks,
        piecewise,
        None if mixing is None else mixing == "",
        mixing or None,
        first.state_written,
        first.inputs_written,
        first.output_aliases,
        memory,
        break_at=parts,
    )


def _break_call(model: str, patterns: Sequence[str]) -> str:
    quoted = [f'"{pattern}"' for pattern in patterns]
    return f"simplegraph.break_at({', '.join([model, *quoted])})"


def _counting(module: nn.Module) -> Iterator[str]:
    """Yield the plain attributes that forwards name, with their values; torch's layers are left out."""
    for child in module.modules():
        kind = type(child)
        if not kind.__module__.startswith("torch.") and isinstance(kind.forward, types.FunctionType):
            plain = {name for name, value in vars(child).items() if issubclass(type(value), (bool, int, float, str))}
            forwards = [vars(base).get("forward") for base in kind.__mro__ if base is not nn.Module]
            codes = [forward.__code__ for forward in forwards if isinstance(forward, types.FunctionType)]
            for name in sorted(plain & set().union(*map(names_in, codes)) - {"training"}):
                yield f"{kind.__name__}.{name}={shown_entry(value_key(vars(child)[name]))}"


def _without_advice(problem: str) -> str:
    """Remove the advice from a problem: the report gives it elsewhere."""
    ways = "@simplegraph.eager_break", "simplegraph.break_at", "simplegraph.wrap_parts"
    return "\n".join(line for line in problem.splitlines() if not any(way in line for way in ways))


def _problem(
    trials: Sequence[ModuleTrial], mode: Literal["FULL", "PIECEWISE"] = "FULL", inlined: Collection[Any] = ()
) -> str | None:
    """Return the first problem of any batch; None if there is none."""
    problems = (trial.problem(mode, inlined) for trial in trials)
    return next((problem for problem in problems if problem is not None), None)


class ModuleTrial:
    """Tries one module on one set of inputs, and restores its state.

    Args:
        module, args, kwargs: the call to try.
        config: batch dimensions, and operators that break.
        before: called with a batch's number before each of its runs and replays, to set metadata.
        number: this batch's number.

    Attributes:
        state_written, inputs_written: names of state and of arguments that an eager run wrote.
        output_aliases: outputs that share memory with an argument or with the module.
        breaks: the functions and operators that broke.
        failed_at: the pattern of the part with the latest problem; empty for the whole module.
    """

    failed_at = ""

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
        reader = CallReader(module.forward, config, argument_rules(module))
        self._leaves, self._names, self._spec = reader.leaves(args, kwargs)
        try:
            device = device_of(self._leaves)
            device = (device_of_state(module) or device) if device.type == "cpu" else device
            self._rows, self._args, _ = reader.read(self._leaves, self._names, self._spec, (), device)
        except CannotBind as error:
            raise InputError(f"check cannot use these inputs: {error.explained}") from None
        pairs = zip(self._leaves, self._args, strict=True)
        hosted = [(leaf.nbytes, arg.name) for leaf, arg in pairs if isinstance(arg, HostInput)]
        if hosted:
            _, moved = max(hosted)  # beside it on the device, a number may stay on the CPU
            raise InputError(
                f"check compares runs on {device}, and {moved} is on the CPU: pass {moved}.to({str(device)!r}). "
                "A wrapped module may be called with either, if its forward moves what it is passed."
            )
        self._device = graph_device(device)
        entries = (entry for entry in held_tensors(module) if has_address(entry.tensor))
        self._state = {name: part for entry in entries for name, part in _named_parts(entry)}
        self._generators = (default_generator(self._device.torch_device), torch.default_generator)
        self._before = before
        self._number = number
        self._batches = {number: self._leaves}
        self._config = config
        self._observe()

    def _observe(self) -> None:
        """Run once eagerly, to find the writes of the forward, the aliases of its outputs, and its breaks."""
        buffers = [(name, part) for name, part in self._state.items() if not isinstance(part, nn.Parameter)]
        leaves = cloned(self._leaves)
        # Tensors that the module makes at its first call and keeps stay for all later runs.
        with Undo(SavedMemory(buffers), self._generators) as undo:
            observer = MemoryObserver(before_write=undo.copy)
            outputs, trace = self._traced(leaves, observer)
        state = {storage_key(tensor): name for name, tensor in self._state.items()}
        named = zip(leaves, self._names, strict=True)
        inputs = {storage_key(leaf): name for leaf, name in named if isinstance(leaf, Tensor)}
        self.breaks = list(dict.fromkeys(call.function for call in trace.calls))
        self.state_written, self.inputs_written = (
            tuple(sorted(names[key] for key in observer.written if key in names)) for names in (state, inputs)
        )
        self.output_aliases = tuple(
            f"output {index} ({(state | inputs)[storage_key(leaf)]})"
            for index, leaf in enumerate(outputs)
            if isinstance(leaf, Tensor) and storage_key(leaf) in state | inputs
        )
        self._unreturnable = unreturnable(outputs)
        written = [(name, self._state[name]) for name in self.state_written]
        self._memory = SavedMemory(list(dict(buffers + written).items()))

    def _traced(self, leaves: Sequence[Any], observer: MemoryObserver) -> tuple[list[Any], BreakTrace]:
        """Run eagerly; return the leaves of the outputs, and the trace of the breaks."""
        tracer = BreakTracer(breaking_operators(), observer, self._device.torch_device)
        with observer, recording_breaks(tracer):
            outputs = self._run(leaves)
        return outputs, tracer.finish(outputs)

    def add_batch(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Add a batch to compare replays on; False, without adding it, if it needs another graph."""
        leaves, spec = flatten((args, kwargs))
        alike = spec == self._spec and [_form(leaf) for leaf in leaves] == [_form(leaf) for leaf in self._leaves]
        if alike:
            self._batches[number] = leaves
        return alike

    def _run(self, leaves: Sequence[Any], wrapped: Any = None, number: int | None = None) -> list[Any]:
        """Run the module eagerly, or a wrapper of it, on these inputs; return the leaves of the outputs."""
        self._before(self._number if number is None else number)
        args, kwargs = self._spec.unflatten(leaves)
        with bypassed(Reason.NESTED) if wrapped is None else outside_calls():  # else wrapped modules run eagerly
            return flatten(wait_collectives((wrapped or self._module)(*args, **kwargs)))[0]

    @contextlib.contextmanager
    def _undone(self, memory: SavedMemory) -> Iterator[Undo]:
        """Undo the changes that runs in the block make."""
        with Undo(memory, self._generators) as undo:
            undo.watch(self._module)
            yield undo

    def _effects(self, leaves: Sequence[Any], *, start: Mapping[str, Tensor] | None = None, **how: Any) -> Effects:
        """Run on copies of inputs; return the comparable outputs and the contents of memory; undo all changes.

        Args:
            leaves: the inputs.
            start: name of memory of the module -> values to set before the run.
            how: see `_run`.
        """
        with self._undone(self._memory):
            for name, values in (start or {}).items():
                self._state[name].detach().copy_(values)
            outputs = [leaf for leaf in self._run(cloned(leaves), **how) if unreturnable([leaf]) is None]
            return Effects(cloned(outputs), cloned([tensor for _, tensor in self._memory.tensors]), ())

    def mixing(self) -> str | None:
        """Return '' if padding rows do not change real rows, else the change; None if two eager runs differ."""
        first, second = (self._effects(self._leaves).outputs for _ in range(2))
        if first_difference(first, second) is not None:
            return None
        mixed = self._number_of_rows() or self._mixed(self._leaves)
        mixed = mixed or self._mixed(self._part(self._leaves, [0] * self._rows))
        return mixed or self._written_by_padding() or ""

    def _number_of_rows(self) -> str | None:
        """Describe an operator that is passed a number that follows the batch size; None if there is none."""
        runs, half = NumbersBySize(), self._rows // 2
        first, second = (self._numbers(self._rows, self._leaves) for _ in range(2))
        if first.differing_numbers(second) is not None:
            return None  # they change from run to run
        runs.learn(first)
        tried = [(2 * self._rows, self._padded(self._leaves, 1))]
        tried += [(half, self._part(self._leaves, range(half)))] if half else []
        for rows, leaves in tried:
            try:
                found = runs.learn(self._numbers(rows, leaves))
            except Exception as error:
                logger.debug("the forward fails with %d rows: %s", rows, error)
                continue
            if found is not None:
                return found[0]
        return None

    def _numbers(self, rows: int, leaves: Sequence[Any]) -> NumbersSeen:
        """Run eagerly, and return the Python numbers that operators are passed outside of eager breaks."""
        observer = MemoryObserver(rows=rows)
        with self._undone(self._memory), IndexChecks():
            self._traced(cloned(leaves), observer)
        return observer.numbers

    def _written_by_padding(self) -> str | None:
        """Describe memory that padding rows write, found by starting from other values; None if there is none."""
        written = {name: self._state[name] for name in self.state_written if self._state[name].is_floating_point()}
        start = {name: -tensor.detach() - 1 for name, tensor in written.items()}
        try:
            padded = [self._padded(self._leaves, factor) for factor in _FILLS] if start else []
            tried = [self._effects(leaves, start=start).memory for leaves in (self._leaves, *padded)]
        except Exception as error:
            logger.debug("the forward fails with other values in %s: %s", ", ".join(start), error)
            return None
        names = [name for name, _ in self._memory.tensors]
        differences = (first_difference(other, tried[0], names=names) for other in tried[1:])
        return next((f"rows of padding write to the module's memory: {text}" for text in differences if text), None)

    def _mixed(self, leaves: Sequence[Any]) -> str | None:
        """Describe how real rows change if the batch is padded to twice its rows, or halved; None if they do not."""
        alone, half = self._effects(leaves).outputs, self._rows // 2
        tried = [(2 * self._rows, self._padded(leaves, factor)) for factor in _FILLS]
        tried += [(half, self._part(leaves, range(half)))] if half else []
        for rows, other in tried:
            try:
                with IndexChecks():
                    outputs = self._effects(other).outputs
            except Exception as error:
                return f"it raises {type(error).__name__} with {rows} rows: {error}"
            if len(outputs) != len(alone):
                return f"it returns {len(outputs)} values for {rows} rows, and {len(alone)} for {self._rows}"
            for index, pair in enumerate(zip(outputs, alone, strict=True)):
                name, (leaf, like) = f"output {index}", pair
                difference = first_difference([_head(*pair)], [_head(*pair[::-1])], names=[name])
                if difference is None:
                    continue
                if isinstance(leaf, (bool, int, float)):
                    values = f"{like} for {self._rows} rows and {leaf} for {rows} rows"
                    return f"{name} is {values}: {_FOLLOWS}"
                return difference
        return None

    def _part(self, leaves: Sequence[Any], rows: Iterable[int]) -> list[Any]:
        """Return inputs with these rows only."""
        index = torch.tensor(list(rows))
        dims = map(batch_dim_of, self._args)
        pairs = zip(leaves, dims, strict=True)
        return [leaf if dim is None else leaf.index_select(dim, index.to(leaf.device)) for leaf, dim in pairs]

    def _padded(self, leaves: Sequence[Any], factor: int) -> list[Any]:
        """Double the rows of inputs: padding rows are the real rows in reverse, floating-point values times `factor`.

        Indices and masks stay valid: in padding they are zero, or those of real rows.
        """
        padded = []
        for leaf, arg in zip(leaves, self._args, strict=True):
            dim = batch_dim_of(arg)
            if dim is not None:
                number = leaf.is_floating_point() or leaf.is_complex()
                padding_rows = leaf.flip(dim) * (factor if number else bool(factor))
                leaf = torch.cat([leaf, padding_rows.to(leaf.dtype)], dim)
            padded.append(leaf)
        return padded

    def problem(self, mode: Literal["FULL", "PIECEWISE"] = "FULL", inlined: Collection[Any] = ()) -> str | None:
        """Describe the problem of a capture or of its replays; None if there is none.

        Args:
            mode: FULL captures one graph, with its breaks inline; PIECEWISE runs them eagerly.
            inlined: breaks that are captured inline nevertheless.
        """
        if self._unreturnable is not None:
            reason = Reason.UNSUPPORTED_OUTPUT
            return f"{reason.text} ({self._unreturnable}). See: {reason.command}"
        wrapped: Any = wrap(self._module, self._config, mode=mode, capture_sizes=[self._rows], padding=False)
        try:
            self.failed_at = ""
            with inlining(inlined), self._capture(wrapped):
                rounds = itertools.product(range(3), self._batches)
                return next(filter(None, (self._difference(wrapped, turn, number) for turn, number in rounds)), None)
        except VerificationError as error:
            said, _, _ = str(error).partition("\n")  # the advice is to call `check`
            return f"{said} Python state that changes from call to call is frozen."
        except (CaptureError, InputError) as error:
            self.failed_at = getattr(error, "part", "")
            return str(error)
        except Exception as error:
            self.failed_at = self._pattern_of(error.step.whole()[0]) if isinstance(error, ResultChanged) else ""
            return f"{type(error).__name__} at {user_location(error)}: {error}"

    def obstacle(self) -> Obstacle | None:
        """Return the obstacle to piecewise graphs: a part, or the results of an eager break; None if there is none."""
        problem = self.problem("PIECEWISE")
        if problem is not None:
            return Obstacle(self.failed_at, problem)
        expected = self._breaks_with(1)
        for factor in _FILLS:
            try:
                other_run = self._breaks_with(factor)
            except Exception as error:
                logger.debug("the forward fails with floating-point inputs times %s: %s", factor, error)
                continue
            for call, other in zip(expected.calls, other_run.calls, strict=False):
                if not same_results(call, other):
                    passed = [it.kind() for it in (call.arguments or ())[:1] if isinstance(it.kind, weakref.ref)]
                    return Obstacle(self._pattern_of(passed), f"eager break {name_of(call.function)} {_VARIES}.")
            if len(expected.calls) != len(other_run.calls):
                return Obstacle("", "other eager breaks run for other inputs, and a graph calls the same ones.")
        return None

    def _breaks_with(self, factor: int) -> BreakTrace:
        """Run eagerly with floating-point inputs times a factor, and return the trace of the breaks."""
        leaves = [
            leaf * factor if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in cloned(self._leaves)
        ]
        with self._undone(self._memory):
            return self._traced(leaves, MemoryObserver())[1]

    def _pattern_of(self, passed: Sequence[Any]) -> str:
        """Return the pattern of the part whose call was the break with these arguments; empty if it was no part."""
        names = {id(module): name for name, module in self._module.named_modules()}
        name = names.get(id(passed[0]), "") if passed else ""
        return FailingPart(self._module, name, decorable=False).pattern if name else ""

    def memory(self, sizes: Collection[int]) -> MemoryEstimate:
        """Capture the sizes, measure their memory, and drop their graphs.

        Raises:
            ConfigError: the sizes are invalid.
            CaptureError: one of them cannot be captured.
        """
        wrapped: Any = wrap(self._module, self._config, capture_sizes=list(sizes))
        with self._capture(wrapped) as summary:
            taken = [graph.bytes for graph in wrapped.graph_stats.graphs.values()]
            return MemoryEstimate.measured(self._device, taken, summary.bytes)

    @contextlib.contextmanager
    def _capture(self, wrapped: Any) -> Iterator[CaptureSummary]:
        """Capture the wrapped module; afterwards its graphs are dropped and its state is restored."""
        try:
            with self._undone(self._memory), outside_calls():
                self._before(self._number)
                args, kwargs = self._spec.unflatten(cloned(self._leaves))
                summary = wrapped.capture_graphs(*args, **kwargs)
            yield summary
        finally:
            wrapped.reset_graphs()

    def _difference(self, wrapped: Any, turn: int, number: int) -> str | None:
        """Describe how a replay differs from eager on a batch whose rows are rolled by `turn`; None if it does not.

        The first call is a proof, which runs eagerly, and raises VerificationError if its replays differ.
        """
        pairs = [(leaf, batch_dim_of(arg)) for leaf, arg in zip(self._batches[number], self._args, strict=True)]
        leaves = [leaf if dim is None else leaf.roll(turn, dim) for leaf, dim in pairs]
        stats = wrapped.graph_stats
        for graph in wrapped.graph_manager.table.graphs.values():
            graph.compare_again()
        proofs = stats.eager[Reason.PROOF]
        expected = self._effects(leaves, number=number, wrapped=wrapped)
        if stats.eager[Reason.PROOF] == proofs:  # nothing was compared, as too much memory is written
            expected = self._effects(leaves, number=number)
        replays = stats.replays
        effects = self._effects(leaves, number=number, wrapped=wrapped)
        if stats.replays == replays:
            others = [reason for reason in stats.eager if reason is not Reason.PROOF]
            reasons, commands = (", ".join(getattr(reason, name) for reason in others) for name in ("text", "command"))
            return f"the call did not replay: {reasons}. See: {commands}"
        difference = first_difference(effects.outputs, expected.outputs)
        if difference is not None:
            return (
                f"a replay does not equal eager: {difference}. Python state that changes from call to call is frozen."
            )
        names = [name for name, _ in self._memory.tensors]
        difference = first_difference(effects.memory, expected.memory, names=names)
        return difference and f"after a replay, compared with eager: {difference}."


def _named_parts(entry: HeldTensor) -> list[tuple[str, Tensor]]:
    """Return the plain tensors of an entry, with the entry's name, numbered if there are several."""
    tensors = list(parts(entry.tensor))
    return [(entry.name if len(tensors) == 1 else f"{entry.name}.{index}", part) for index, part in enumerate(tensors)]


def _form(leaf: Any) -> Any:
    """Return the properties of an argument that a graph fixes."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _head(leaf: Any, like: Any) -> Any:
    """Return the leading part of `leaf`, with the shape of `like`."""
    if not isinstance(leaf, Tensor) or not isinstance(like, Tensor) or leaf.dim() != like.dim():
        return leaf
    return leaf[tuple(map(slice, like.shape))]
