"""A call of a wrapped module, the layout of its arguments, and everything learnt about calls of its signature."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.context import CALLS, CallContext
from simplegraph.base.errors import HostError
from simplegraph.base.nested import LEAF, TreeSpec, flatten
from simplegraph.base.patches import original_of
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.batch.dispatch import Dispatch
from simplegraph.call.entries import items_of, with_entries, written_mappings
from simplegraph.call.inputs import (
    Arg,
    HostArg,
    HostInput,
    InputSet,
    TensorArg,
    batch_dim_of,
    overlap,
    overlaps_itself,
    short_repr,
)
from simplegraph.call.outputs import OutputShapes, unreturnable
from simplegraph.call.signature import CallReader, Signature
from simplegraph.guard.carried import CarriedTensors
from simplegraph.guard.functions import computes_gradients
from simplegraph.guard.plain_state import PlainState
from simplegraph.guard.python_effects import RepeatedChanges
from simplegraph.guard.survey import Survey
from simplegraph.guard.torch_state import autograd_hindrance
from simplegraph.manager.lifecycle import SignatureRecord
from simplegraph.manager.table import ProgramTable
from simplegraph.program.breaks.break_calls import BreakRows, BreakTrace, trace_between
from simplegraph.program.breaks.rows import alike_rows, rows_between
from simplegraph.program.host_arguments import HostArguments
from simplegraph.program.observe import MemoryObserver, NumbersBySize, NumbersSeen
from simplegraph.program.program import Program

logger = logging.getLogger("simplegraph")
_ATTENTION = nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder
_TRACES = 3  # batch sizes whose traces of eager calls are kept; two are needed


class Graphed:
    """Base class that marks a wrapped module for `invoke`: the next class in the MRO has the module's own call."""


def invoke(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the module's own call, hooks included. The forward's `self` is the module that was passed to `wrap`."""
    original = original_of(module)
    call: Any = super(Graphed, original).__call__ if isinstance(original, Graphed) else original  # type: ignore[misc]
    return call(*args, **kwargs)


@dataclasses.dataclass(eq=False)
class Binding(SignatureRecord):
    """Everything learnt about the calls of one signature: their lifecycle, and observations of their runs.

    Attributes:
        inputs: the static inputs; one set, unless sizes have sets of their own.
        outputs: how outputs follow the batch size.
        layouts: the layouts of its calls, by the structure of the arguments. `CallTable` keeps them: in a circle,
            graphs would outlive their wrapper until a garbage collection.
        traces: traces of the breaks of eager calls, by batch size, for the latest few sizes.
        break_rows: the batch dimensions of arguments and results of breaks; None until two sizes were observed.
        written: names of the inputs that the forward wrote to in observed runs.
        compared: names of inputs whose values were compared before and after an eager run.
        draws: True if the forward draws random numbers.
        differentiates: True if the forward computes under grad mode.
        only_computes: True if no observed run wrote to memory of others.
        repeated_changes: Python state that every run changes, by padded size, since branches may depend on the rows.
        made: indices of outputs whose memory observed runs made.
        numbers: the Python numbers that runs passed to operators.
        host_error: the error of the latest eager run if it did something that a capture must not do; else None.
        waited: names of the CPU tensors that the forward moves to its device by synchronous copies.
    """

    signature: Signature
    inputs: list[InputSet] = dataclasses.field(default_factory=list)
    outputs: OutputShapes = dataclasses.field(default_factory=OutputShapes)
    written: set[str] = dataclasses.field(default_factory=set)
    compared: set[str] = dataclasses.field(default_factory=set)
    repeated_changes: dict[int, RepeatedChanges] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(RepeatedChanges)
    )
    draws: bool = False
    differentiates: bool = False
    only_computes: bool = True
    layouts: weakref.WeakValueDictionary[TreeSpec, CallLayout] = dataclasses.field(
        default_factory=weakref.WeakValueDictionary
    )
    traces: dict[int, BreakTrace] = dataclasses.field(default_factory=dict)
    break_rows: list[BreakRows | None] | None = None
    made: set[int] = dataclasses.field(default_factory=set)
    numbers: NumbersBySize = dataclasses.field(default_factory=NumbersBySize)
    host_error: HostError | None = None
    waited: set[str] = dataclasses.field(default_factory=set)

    def stop_padding(self, table: ProgramTable, text: str, difference: str, remedy: str, *, warn: bool = True) -> None:
        """Run padded calls eagerly from now on, and warn about it.

        Args:
            table: the table of their graphs.
            text: the effect of padding, as a sentence.
            difference: the difference of the results.
            remedy: the advice.
            warn: False if the caller raises an error.
        """
        self.refuse_padding(CannotBind(Reason.PADDING_SHOWS, difference))
        texts = table.stats.name, text, difference, "Padded batches of such calls now run eagerly.", remedy
        if warn:
            logger.warning("simplegraph: %s: %s: %s.\n  %s %s\n  See: %s", *texts, Reason.PADDING_SHOWS.command)

    def learn_numbers(self, table: ProgramTable, seen: NumbersSeen, *, in_graph: bool = False) -> str | None:
        """Learn if a Python number follows the batch size; if one does, refuse padding and return the difference.

        `in_graph` is true if the forward was captured.
        """
        difference = self.numbers.learn(seen, in_graph=in_graph)
        if difference is not None and self.padding_refusal is None and table.config.padding:
            self.stop_padding(table, "padding changes the answer", *difference)
        return None if difference is None else difference[0]

    def note_trace(self, rows: int, trace: BreakTrace) -> None:
        """Keep the trace of the breaks of an eager call with `rows` rows."""
        self.traces.pop(rows, None)
        self.traces[rows] = trace
        while len(self.traces) > _TRACES:
            del self.traces[next(iter(self.traces))]
        for other, seen in self.traces.items():
            if other == rows or any(call.arguments is None for call in (*seen.calls, *trace.calls)):
                continue
            result = rows_between((other, seen), (rows, trace))
            earlier = self.break_rows
            if not isinstance(result, str) and earlier is not None and not all(map(alike_rows, earlier, result)):
                result = f"eager breaks are passed or return rows in other dimensions at {rows} rows"
            if isinstance(result, str):
                self._refuse_cut(result)
                return
            self.break_rows = result

    def _refuse_cut(self, problem: str) -> CannotBind:
        """Run padded calls eagerly from now on, since a break cannot be passed the real rows alone."""
        why = CannotBind(Reason.PADDING_SHOWS, f"{problem}; capture this size, too")
        self.refuse_padding(why)
        return why

    def can_cut_breaks(self, padded: int) -> bool:
        """True if arguments of breaks can be cut to the real rows as soon as the size `padded` is traced."""
        return self.break_rows is not None or any(rows != padded for rows in self.traces)

    def cut_breaks(self, program: Program, padded: int) -> None:
        """Pass only the real rows to the breaks of a padded graph. Raises CannotBind if this is impossible."""
        if self.break_rows is None:
            raise CannotBind(Reason.OUTPUT_SHAPE_UNKNOWN, "only one batch size has been seen so far")
        problem = program.cut_breaks_by(self.break_rows, padded)
        if problem is not None:
            raise self._refuse_cut(problem).again()

    def trace_at(self, rows: int) -> BreakTrace | None:
        """Return the trace of breaks at a batch size, from a call of this size, or from calls of two other sizes."""
        pairs = itertools.combinations(self.traces.items(), 2)
        return self.traces.get(rows) or next(filter(None, (trace_between(*pair, rows) for pair in pairs)), None)

    def note_written(self, observer: MemoryObserver, memory: Mapping[str, int]) -> None:
        """Note the inputs that a run wrote to; `memory` has the storage keys of inputs by name."""
        self.written |= {name for name, key in memory.items() if key in observer.written}
        on_cpu = (arg.name for arg in self.signature.args if isinstance(arg, (HostArg, HostInput)))
        hosted = [name for name in on_cpu if name in self.written]
        if hosted:
            self.refuse(CannotBind(Reason.WRONG_DEVICE, f"{hosted[0]} is on the CPU and the forward writes to it"))

    def learn_outputs(self, size: int, leaves: Sequence[Any], spec: TreeSpec) -> None:
        """Note the output's structure and shapes at a batch size; refuse the signature if no replay can return it."""
        detail = unreturnable(leaves)
        if detail is not None:
            self.refuse(CannotBind(Reason.UNSUPPORTED_OUTPUT, detail))
            return
        try:
            self.outputs.learn(size, leaves, spec)
        except CannotBind as error:
            self.refuse_padding(error.again())


@dataclasses.dataclass(eq=False)
class CallLayout:
    """One way of passing the arguments of a signature (by position or keyword, nested alike), and its plans.

    Attributes:
        spec: the structure of ``(args, kwargs)``.
        args: the expected argument for each leaf.
        device_type: the type of the device of the calls.
        binding: everything learnt about the signature.
        training: the mode of the module.
        plans: by `plan_key`: a `Plan` that replays such calls, or a `Refusal` if they run eagerly.
        launches_early: True if the plan of the latest replay may launch its graph before the next call is checked.
        autocast: the autocast dtype in force.
        state: the module's Python state (`state_key`).
        settings: settings of torch (`TorchSettings`).
        modes: the default devices that `torch.device` sets.
        values: the plain values that calls read through Python.
        hosted: True if some arguments are on the CPU, and the graph is on a GPU.
        positional: the number of arguments if all are passed by position and are leaves; else -1.
        anchor: the index of the leaf that has the batch size; -1 without one, and then all calls have size 1.
        anchor_dim: the dimension of this leaf that is the batch.
    """

    spec: TreeSpec
    args: Sequence[Arg]
    device_type: str
    binding: Binding
    training: bool = False
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict)
    launches_early: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self) -> None:
        self.autocast, self.state, self.settings, self.modes, _, self.values = self.binding.signature.context
        positional, keyword = self.spec.children
        self.hosted = any(isinstance(arg, (HostArg, HostInput)) for arg in self.args)
        self._flat = all(child == LEAF for child in (*positional.children, *keyword.children))
        self._num_args, self._keywords = len(positional.children), keyword.keys
        self.positional = self._num_args if self._flat and not self._keywords else -1
        dims = enumerate(map(batch_dim_of, self.args))
        self.anchor, self.anchor_dim = next(((index, dim) for index, dim in dims if dim is not None), (-1, 0))

    def described_inputs(self) -> dict[str, str]:
        """Describe the arguments, the autocast dtype and the state that a graph is captured for."""
        described = {arg.name: str(arg) for arg in self.args}
        context = {"autocast": self.autocast, "state": self.state}
        return described | {name: short_repr(value) for name, value in context.items() if value is not None}

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any] | None:
        """Return the leaves of a call in the order of `args`; None if the call has another layout."""
        if not self._flat:
            leaves, spec = flatten((args, kwargs))
            return leaves if spec == self.spec else None
        if len(args) != self._num_args:
            return None
        if kwargs:
            return (*args, *kwargs.values()) if tuple(kwargs) == self._keywords else None
        return args if not self._keywords else None

    def batch_size(self, leaves: Sequence[Any]) -> int:
        """Return the batch size of a call with these leaves. May raise if the call has another layout."""
        return int(leaves[self.anchor].shape[self.anchor_dim]) if self.anchor >= 0 else 1


def plan_key(size: int, context: CallContext | None) -> Hashable:
    """Return the key of a call's plan in its layout: the batch size, and the description of the batch in a context."""
    return size if context is None else (size, context.batch)


@dataclasses.dataclass(eq=False)
class Call:
    """A call of the wrapped module, after its arguments were read.

    Attributes:
        binding: the binding of its layout.
        spec: the structure of its arguments.
        size: the batch size as the layout reads it, which is the key of its plan.
        padded: the number of rows of its graph.
        padding: the number of padding rows among them.
        key: the key of its graph.
        plan_key: the key of its plan in the layout.
        breaks: True if its graph is piecewise, so that its warmup must trace breaks.
        computes_gradients: True if the module's calls call backward themselves, as training steps do.
        plain: reads the plain values of the module.
        carried: the places in which runs leave tensors.
    """

    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    names: list[str]
    batch: int
    layout: CallLayout
    dispatch: Dispatch
    size: int
    plain: PlainState
    carried: CarriedTensors

    def __post_init__(self) -> None:
        mode, descriptor = self.dispatch[:2]
        self.binding, self.spec = self.layout.binding, self.layout.spec
        self.padded, self.padding = descriptor.num_tokens, descriptor.num_tokens - self.batch
        self.key: tuple[Hashable, ...] = (self.binding.signature, mode, descriptor)
        self.plan_key = plan_key(self.size, CALLS.context)
        self.breaks = mode is CudaGraphMode.PIECEWISE
        self.computes_gradients = computes_gradients(self.module)

    @functools.cached_property
    def survey(self) -> Survey:
        """The module's tensors and submodules; listed again after each run of the forward, which may replace them."""
        return Survey(self.module)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's own call on these arguments; return `WithEntries` if mappings are among them."""
        try:
            with self.plain.run(self.module):
                mappings = written_mappings(args, kwargs)
                before = items_of(mappings) if mappings else []
                if self.carried.places:
                    run = functools.partial(invoke, self.module, args)
                    result = self.carried.run(run, kwargs, is_call=kwargs is self.kwargs)
                else:
                    result = invoke(self.module, args, kwargs)
                return with_entries(result, mappings, before) if mappings else result
        finally:
            vars(self).pop("survey", None)

    def check(self) -> None:
        """Refuse a call that no graph can serve, by the knowledge about its signature. Raises CannotBind."""
        binding = self.binding
        if binding.refusal is not None:
            raise binding.refusal.again()
        if binding.differentiates and (hindered := autograd_hindrance()) is not None:
            raise CannotBind(*hindered)
        mappings = written_mappings(self.args, self.kwargs)
        if len(set(map(id, mappings))) < len(mappings):  # a graph has a mapping of its own for each that it is passed
            raise CannotBind(Reason.ALIASED, f"a {type(mappings[0]).__name__} that is passed twice")
        for repeated in binding.repeated_changes.values():  # other sizes may advance the same state unseen
            repeated.check(self.module)
        if self.padding and binding.padding_refusal is not None:
            raise binding.padding_refusal.again()
        if self.padding and binding.draws:
            raise CannotBind(
                Reason.SIZE_NOT_CAPTURED, f"the forward draws random numbers; add {self.batch} to capture_sizes"
            )
        copied = {arg.name: leaf for leaf, arg in zip(self.leaves, self.layout.args, strict=True) if is_copied(arg)}
        written = (copied[name] for name in copied.keys() & binding.written)
        # Their memory overlaps, and that of their static buffers would not.
        if binding.written and (overlap(copied.values()) or any(map(overlaps_itself, written))):
            raise CannotBind(Reason.ALIASED, ", ".join(name for name, _ in self.tensors))

    def never_compared(self) -> list[str]:
        """Return names of inputs that unobserved kernels may write, and that were too large to be compared."""
        compared = self.binding.written | self.binding.compared
        return [arg.name for arg in self.layout.args if is_copied(arg) and arg.name not in compared]

    def confirmed(self, reader: CallReader) -> bool:
        """True if no batch dimension of the call is a guess that rests on one batch size."""
        return reader.confirmed(self.batch, self.leaves, self.names, self.spec)

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensor leaves that have static inputs, by name."""
        arguments = zip(self.names, self.leaves, self.layout.args, strict=True)
        return ((name, leaf) for name, leaf, arg in arguments if isinstance(arg, TensorArg))

    @property
    def shows_python(self) -> bool:
        """True if a run may use a torch function mode, under which torch's attention loses its fast path."""
        return not any(issubclass(type(module), _ATTENTION) for module in self.survey.modules.values())

    def host_arguments(self) -> HostArguments:
        """Return the CPU tensors among the arguments of a call on another device."""
        arguments = HostArguments(shows_python=self.shows_python)
        for leaf, arg in zip(self.leaves, self.layout.args, strict=True):
            if isinstance(arg, (HostArg, HostInput)):
                arguments.add(arg.name, leaf, by_value=isinstance(arg, HostArg))
        return arguments

    def at_exact_size(self) -> Call:
        """Return the call for a graph of exactly its rows, which needs no batch dimensions."""
        descriptor = dataclasses.replace(self.dispatch.descriptor, num_tokens=self.batch)
        return dataclasses.replace(self, dispatch=Dispatch(self.dispatch.mode, descriptor, Reason.EXACT, 0))

    @property
    def memory(self) -> dict[str, int]:
        """The storage keys of the tensor leaves, by name."""
        named = zip(self.names, self.leaves, strict=True)
        return {name: storage_key(leaf) for name, leaf in named if issubclass(type(leaf), Tensor)}


def is_copied(arg: Arg) -> bool:
    """True if the argument's tensor is copied into a static input, and not read in place."""
    return isinstance(arg, TensorArg) and arg.batch_dim != "reference"
