"""Breaks: their calls in a warmup, and the steps of a Program that call them at every replay.

A capture does not run breaks, since the values that they would read do not exist yet. The warmup before the capture
showed the form of each result. In the capture, a stand-in takes the place of the result. Every replay copies the result
to the memory of its stand-in, or checks that it is there already.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.errors import BreakError
from simplegraph.base.nested import ATOMS, TreeSpec, Withheld, constant_key, flatten
from simplegraph.base.tensors import lies_at, storage_key

Accept = Callable[[Any], str | None]

HOLD_MORE = (
    "Let the break hold everything up to where shapes are fixed again, and what depends on such a number: mark a "
    "function around all of it, or break at the module (simplegraph.break_at)"
)


class ReplayStopped(BreakError):
    """Stops a replay at a break, since the segments after it were captured for something else.

    Args:
        step: the break.
        cause: what it did, as a sentence without a period.
        expected: what the segments after it were captured for.
        remedy: what to do, as a sentence without a period.

    Attributes:
        graph: the `CapturedGraph` that was replayed; None until the table sets it.
        returned: the results of the breaks in this replay, in order; empty if they were not kept.
    """

    def __init__(self, step: Break, cause: str, expected: str, remedy: str) -> None:
        self.step, self.cause, self.remedy = step, cause, remedy
        self.graph: Any = None
        self.returned: Sequence[Any] = ()
        super().__init__(
            f"{cause}.\n  The segments after it were captured for {expected}, and did not run.\n  {remedy}."
        )


class ResultChanged(ReplayStopped):
    """Stops a replay at a break whose result differs in form from the captured one."""

    def __init__(self, step: Break, problem: str) -> None:
        expected = "results of one structure, shape and dtype, and numbers of one value"
        remedy = f"{HOLD_MORE}; or capture again with reset_graphs()"
        super().__init__(step, f"eager break {step.name} returned {problem}", expected, remedy)


class StateChanged(ReplayStopped):
    """Stops a replay at a break that set what the segments after it may read.

    Attributes:
        found: what it set; see `guard.set_by_break.SetByBreak`.
    """

    def __init__(self, step: Break, found: Any) -> None:
        cause = f"eager break {step.name} set {found.names}, which the forward may read"
        super().__init__(step, cause, "the values before", found.remedy)
        self.found = found


@dataclasses.dataclass(eq=False)
class Cell:
    """Holds an object that a break replaces at each replay and later breaks read."""

    value: Any


class BreakSite(NamedTuple):
    """The point of a capture at which stand-ins for a break's results are made.

    Attributes:
        leaves: the leaves of the break's arguments, as the forward passed them.
        passed: the same leaves, as every replay will pass them.
        keep: returns a captured tensor in a form that steps may hold.
        cells: by the id of an object, the cell that later breaks read in its place.
    """

    leaves: Sequence[Any]
    passed: Sequence[Any]
    keep: Callable[[Tensor], Tensor]
    cells: dict[int, Cell]


class Result(NamedTuple):
    """One leaf of a break's result.

    Attributes:
        make: makes the stand-in, called with `fixed`, `geometry` and a `BreakSite`.
        fixed: arguments of `make` that are the same at every batch size.
        geometry: arguments of `make`, in nested tuples, whose integers may follow the batch size.
        any_size: True if it is known to be the same for every batch size.
    """

    make: Callable[..., tuple[Any, Accept]]
    fixed: tuple[Any, ...]
    geometry: tuple[Any, ...] = ()
    any_size: bool = False

    def stand_in(self, site: BreakSite) -> StandIn:
        """Return the stand-in for a capture, and the function that accepts the value of a replay."""
        return self.make(*self.fixed, *self.geometry, site)


IN_THE_CALL = object()  # in place of the address of a tensor that the call was passed, or that the forward made


class Argument(NamedTuple):
    """Describes one leaf of a break's arguments, to compare it with the same leaf at another batch size.

    Attributes:
        kind: for a strided tensor its class, its dtype, and its address or `IN_THE_CALL`; else the value, or a
            reference.
        geometry: shape and strides of a strided tensor; else None.
        filled: True if it is a tensor of the forward that the break fills or writes to.
    """

    kind: Any
    geometry: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    filled: bool = False


class BreakRows(NamedTuple):
    """The batch dimension of each leaf of a break's arguments and results; None for a leaf without one.

    Attributes:
        arguments, results: the dimensions.
        filled: for each leaf of the arguments, True if the break fills rows that the next segment reads.
    """

    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]
    filled: tuple[bool, ...]


class BreakCall(NamedTuple):
    """One call of a break, as a warmup observed it.

    Attributes:
        function: the function of the break.
        made_here: for each leaf of the arguments, True if it is a tensor that the forward made.
        spec, results: the structure of the result, and its leaves.
        problem: why no graph can contain this break; None if a graph can.
        arguments: a description of each leaf of the arguments; None if the call is derived from two other sizes.
        effects: see `Break`.
    """

    function: Callable[..., Any]
    made_here: tuple[bool, ...]
    spec: TreeSpec
    results: tuple[Result, ...]
    problem: str | None = None
    arguments: tuple[Argument, ...] | None = None
    effects: str | None = None

    @property
    def any_size(self) -> bool:
        """True if the form of the result is known at all batch sizes."""
        return self.problem is None and all(result.any_size for result in self.results)


@dataclasses.dataclass
class BreakTrace:
    """The calls of breaks in a forward, as a warmup observed them.

    Attributes:
        operators: operators that break by themselves.
        calls: the calls, in the order of the forward.
    """

    operators: frozenset[Any]
    calls: list[BreakCall] = dataclasses.field(default_factory=list)

    @property
    def any_size(self) -> bool:
        """True if captures of all batch sizes can use the trace."""
        return all(call.any_size for call in self.calls)


def trace_between(one: tuple[int, BreakTrace], other: tuple[int, BreakTrace], rows: int) -> BreakTrace | None:
    """Derive the trace of a batch size from traces of two others, each given with its size.

    Returns:
        The trace; None if some length differs between the two traces, and is not proportional to the batch size.
    """
    (a, first), (b, second) = one, other
    if a == b or len(first.calls) != len(second.calls):
        return None
    calls = []
    for call, like in zip(first.calls, second.calls, strict=True):
        alike = (call.function, call.spec, call.problem) == (like.function, like.spec, None)
        if not alike or len(call.made_here) != len(like.made_here):
            return None
        results = []
        for result, same in zip(call.results, like.results, strict=True):
            geometry = _follow(result.geometry, same.geometry, (a, b), rows)
            if result.make is not same.make or geometry is None or not all(map(same_value, result.fixed, same.fixed)):
                return None
            results.append(result._replace(geometry=geometry))
        calls.append(call._replace(results=tuple(results), arguments=None))
    return BreakTrace(first.operators, calls)


def same_value(one: Any, other: Any) -> bool:
    """True for the same object, and for equal plain values."""
    return one is other or (
        issubclass(type(one), ATOMS) and type(one) is type(other) and constant_key(one) == constant_key(other)
    )


def same_results(call: BreakCall, other: BreakCall) -> bool:
    """True if the same segment can read the results of both calls of a break: they have one structure and form."""
    if call.function != other.function or call.spec != other.spec:
        return False
    return all(
        result.make is same.make and result.geometry == same.geometry and all(map(same_value, result.fixed, same.fixed))
        for result, same in zip(call.results, other.results, strict=True)
    )


def _follow(one: Any, other: Any, sizes: tuple[int, int], rows: int) -> Any:
    """Derive a geometry at `rows` rows from those at two sizes; None if it is not proportional to the size."""
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        parts = [_follow(*pair, sizes, rows) for pair in zip(one, other, strict=True)]
        return None if None in parts else tuple(parts)
    if type(one) is int and type(other) is int and one != other:
        a, b = sizes
        return one // a * rows if one * b == other * a and one % a == 0 else None
    return one if one == other else None


class Tail(NamedTuple):
    """The padding rows of a tensor that the next segment reads; a break that is passed the real rows leaves them.

    Attributes:
        padding: a view of the padding rows.
        real: a view of the real rows; last: of the last real row.
        dim: the batch dimension.
    """

    padding: Tensor
    real: Tensor
    last: Tensor
    dim: int

    @classmethod
    def of(cls, tensor: Tensor, dim: int, rows: int) -> Tail:
        """Return the padding rows of a tensor that has `rows` real rows."""
        padding = tensor.narrow(dim, rows, tensor.shape[dim] - rows)
        return cls(padding, tensor.narrow(dim, 0, rows), tensor.narrow(dim, rows - 1, 1), dim)

    def repeat_last(self) -> None:
        """Fill the padding rows with the last real row: indices from an earlier batch may be out of range."""
        self.padding.copy_(self.last)

    def repeat_all(self) -> None:
        """Fill the padding rows with the real rows, repeated cyclically."""
        places = torch.arange(self.padding.shape[self.dim], device=self.real.device) % self.real.shape[self.dim]
        self.padding.copy_(self.real.index_select(self.dim, places))


class BreakArguments(NamedTuple):
    """Builds the arguments of a break for a replay.

    Attributes:
        nested: the structure of the parts.
        parts: graph memory, cells, and objects that are the same at each replay.
        leaves: the index of each part among the leaves of the forward's arguments; None for a container that is passed
            as it is.
    """

    nested: TreeSpec
    parts: Sequence[Any]
    leaves: Sequence[int | None]

    @property
    def fixed(self) -> bool:
        """True if all replays may pass the same containers."""
        deep = (child.type is not None for arguments in self.nested.children for child in arguments.children)
        return not any(deep) and not any(isinstance(part, Cell) for part in self.parts)

    def __call__(self) -> Any:
        """Return the positional and the keyword arguments of a replay."""
        return self.nested.unflatten([leaf.value if issubclass(type(leaf), Cell) else leaf for leaf in self.parts])

    def cut(self, dims: Sequence[int | None], rows: int) -> BreakArguments:
        """Return the arguments with the tensors cut to their first `rows` rows, given their batch dimensions."""
        return self._replace(
            parts=[
                part if leaf is None or dims[leaf] is None else part.narrow(dims[leaf], 0, rows)
                for part, leaf in zip(self.parts, self.leaves, strict=True)
            ]
        )

    def tensor(self, leaf: int) -> Tensor | None:
        """Return the tensor of a leaf; None if it is in a container that is passed as it is."""
        return self.parts[self.leaves.index(leaf)] if leaf in self.leaves else None


class _Form(NamedTuple):
    """The arguments and accepted results of a break at one number of rows; see `Break`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rebuilt: Callable[[], Any] | None
    accepts: list[Accept]
    tails: Sequence[Tail]


_MAX_FORMS = 64  # numbers of rows for which a break keeps its arguments


@dataclasses.dataclass(eq=False)
class Break:
    """A call that runs eagerly at every replay.

    Attributes:
        name: its name in reports.
        function: the function to call.
        whole: the arguments for all rows of the graph; graph memory among them is borrowed.
        modes: re-enters the grad mode, inference mode and autocast that the forward set around the call; None if none.
        args, kwargs: the arguments at the current number of rows.
        rebuilt: makes `args` and `kwargs` for each replay; None if they stay the same.
        spec, accepts: the structure of the result, and the function that accepts each leaf; set during the capture.
        tails: padding rows of arguments that the break fills, at the current number of rows.
        effects: why an eager run that repeats the forward up to this break would differ from the first run; empty if
            it would not, None if nothing was observed. A warmup observes it, and a proof adds to that.
        keeps: True if the result is kept until the replay is over.
        returned: the result in the current replay.
        find_changes: called after each call; returns what the call set and later segments may read, or None. None if
            nobody looks.
        dims: the batch dimensions of arguments and results; None if the break is passed padding rows, too.
    """

    name: str
    function: Callable[..., Any]
    whole: BreakArguments
    modes: Callable[[], AbstractContextManager[None]] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    rebuilt: Callable[[], Any] | None = None
    spec: TreeSpec | None = None
    accepts: list[Accept] = dataclasses.field(default_factory=list)
    tails: Sequence[Tail] = ()
    effects: str | None = None
    keeps: bool = False
    returned: Any = None
    find_changes: Callable[[], Any] | None = None
    dims: BreakRows | None = None

    def __post_init__(self) -> None:
        self._forms: dict[int, _Form] = {}
        self.pass_to(self.whole)

    def pass_to(self, arguments: BreakArguments) -> None:
        """Use these arguments from now on."""
        fixed = arguments.fixed
        self.rebuilt = None if fixed else arguments.__call__
        self.args, self.kwargs = arguments() if fixed else ((), {})

    def replay(self) -> None:
        """Call the function, and copy its result to the memory that the next segment reads.

        Raises:
            ResultChanged: the result differs in form from the one that the next segment was captured with.
            StateChanged: the call set what the next segments may read.
        """
        args, kwargs = self.rebuilt() if self.rebuilt else (self.args, self.kwargs)
        if self.modes is None:
            self._take(self.function(*args, **kwargs))
        else:
            with self.modes():
                self._take(self.function(*args, **kwargs))

    def _take(self, result: Any) -> None:
        self.returned = result
        if self.find_changes is not None and (found := self.find_changes()) is not None:
            raise StateChanged(self, found)
        leaves, spec = flatten(result)
        if spec != self.spec:
            raise self._refused(f"{_nesting(spec)} where it returned {_nesting(self.spec)} before")
        for accept, leaf in zip(self.accepts, leaves, strict=True):
            problem = accept(leaf)
            if problem is not None:
                raise self._refused(problem)
        for tail in self.tails:
            tail.repeat_last()
        if not self.keeps:
            self.returned = None

    # Batches with padding rows.

    def hindrance(self, dims: BreakRows, rows: int) -> str | None:
        """Say why a break in a graph of `rows` rows cannot be passed fewer rows in these dimensions; None if it can."""
        for leaf, dim in enumerate(dims.arguments):
            if dim is None:
                continue
            tensor = self.whole.tensor(leaf)
            if tensor is None:
                return f"eager break {self.name} is passed rows in a container that the forward did not make"
            if tensor.dim() <= dim or tensor.shape[dim] != rows:
                return f"eager break {self.name} is passed {shown(tensor)} at {rows} rows"
        accepts = self._forms[0].accepts if self._forms else self.accepts
        for accept, dim in zip(accepts, dims.results, strict=True):
            taker = getattr(accept, "__self__", None)
            if dim is not None and (not isinstance(taker, (Bridge, _InPlace)) or taker.target.shape[dim] != rows):
                return f"eager break {self.name} returns something else at {rows} rows"
        return None

    def cut(self, rows: int) -> None:
        """Pass this number of rows from now on; 0 for all rows."""
        if self.dims is None:
            return
        if not self._forms:
            self._forms[0] = _Form(self.args, self.kwargs, self.rebuilt, self.accepts, ())
        elif len(self._forms) == _MAX_FORMS and rows not in self._forms:
            self._forms = {0: self._forms[0]}
        form = self._forms.get(rows)
        if form is None:
            form = self._forms[rows] = self._cut_form(self.dims, rows)
        self.args, self.kwargs, self.rebuilt, self.accepts, self.tails = form

    def _cut_form(self, dims: BreakRows, rows: int) -> _Form:
        accepts = [
            accept if dim is None else accept.__self__.cut(dim, rows)  # type: ignore[attr-defined]
            for accept, dim in zip(self._forms[0].accepts, dims.results, strict=True)
        ]
        tails = [
            Tail.of(tensor, dim, rows)
            for leaf, (dim, filled) in enumerate(zip(dims.arguments, dims.filled, strict=True))
            if filled and dim is not None and (tensor := self.whole.tensor(leaf)) is not None
        ]
        self.pass_to(self.whole.cut(dims.arguments, rows))
        return _Form(self.args, self.kwargs, self.rebuilt, accepts, tails)

    @property
    def bridged_bytes(self) -> int:
        """The bytes of returned tensors that replays copy."""
        bridges = (getattr(accept, "__self__", None) for accept in self.accepts)
        return sum(bridge.target.nbytes for bridge in bridges if isinstance(bridge, Bridge))

    def _refused(self, problem: str) -> ResultChanged:
        return ResultChanged(self, problem)


def _nesting(spec: TreeSpec | None) -> str:
    if spec is None or spec.type is None:
        return "one value"
    return f"a {spec.type.__name__} of {len(spec.children)}"


StandIn = tuple[Any, Accept]  # the stand-in for a result, and the function that accepts the value of a replay


class Bridge:
    """Copies a tensor that a break made to the memory that the next segment reads.

    Attributes:
        target: this memory, of the real rows.
        tail: its padding rows, if there are any.
    """

    def __init__(self, target: Tensor, tail: Tail | None = None) -> None:
        self.target, self.tail = target, tail
        self._kind = (target.shape, target.dtype, target.device, target.layout)

    def cut(self, dim: int, rows: int) -> Accept:
        """Return what takes so many rows."""
        return Bridge(self.target.narrow(dim, 0, rows), Tail.of(self.target, dim, rows)).accept

    def accept(self, leaf: Any) -> str | None:
        if not issubclass(type(leaf), Tensor) or (leaf.shape, leaf.dtype, leaf.device, leaf.layout) != self._kind:
            return f"{shown(leaf)} in place of {shown(self.target)}"
        self.target.copy_(leaf.detach() if leaf.requires_grad else leaf)
        if self.tail is not None:
            self.tail.repeat_last()
        return None


def _bridge(
    dtype: torch.dtype, device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], site: BreakSite
) -> StandIn:
    """Stand in for a tensor that the break makes: each replay copies its tensor to memory of the capture."""
    with torch.inference_mode(False):  # not an inference tensor: replays in other modes write to it
        bridge = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return bridge, Bridge(site.keep(bridge)).accept


def pass_back(index: int, site: BreakSite) -> StandIn:
    """Stand in for an argument that the break returns, given by its index among the leaves; it is in place already."""
    given, passed = site.leaves[index], site.passed[index]

    def accept_argument(leaf: Any) -> str | None:
        expected = passed.value if isinstance(passed, Cell) else passed
        return None if leaf is expected else f"{shown(leaf)} in place of its own argument"

    return given, _InPlace(passed).accept if isinstance(given, Tensor) else accept_argument


def pass_view(index: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, site: BreakSite) -> StandIn:
    """Stand in for a view of an argument; `offset` counts from the argument's first element."""
    both = site.leaves[index], site.passed[index]
    given, passed = (tensor.as_strided(shape, stride, tensor.storage_offset() + offset) for tensor in both)
    return given, _InPlace(passed).accept


def _outside(tensor: Tensor, site: BreakSite) -> StandIn:
    """Stand in for a tensor from before the forward: the graph reads it in place, so each replay must return it."""
    return tensor, _InPlace(tensor).accept


class _InPlace:
    """Accepts a tensor that is already in the memory that the next segment reads."""

    def __init__(self, target: Tensor) -> None:
        self.target, self._memory = target, lies_at(target)

    def cut(self, dim: int, rows: int) -> Accept:
        """Return what takes so many rows."""
        return _InPlace(self.target.narrow(dim, 0, rows)).accept

    def accept(self, leaf: Any) -> str | None:
        if leaf is self.target or (issubclass(type(leaf), Tensor) and lies_at(leaf) == self._memory):
            return None
        return f"{shown(leaf)} at another address; it was in place at the warmup. Return a clone, or always that one"


def _constant(value: Any, site: BreakSite) -> StandIn:
    """Stand in for a plain value: the next segments are captured with it, so each replay must return it."""

    def accept_constant(leaf: Any) -> str | None:
        return (
            None
            if same_value(leaf, value)
            else f"{shown(leaf)} in place of {shown(value)}, which the segments after it were captured with"
        )

    return value, accept_constant


def hand_on(kind: type, site: BreakSite) -> StandIn:
    """Stand in for another object, such as a handle of asynchronous work: later breaks are passed each replay's own."""
    cell = Cell(Withheld(kind, "that an eager break returned"))
    site.cells[id(cell.value)] = cell
    return cell.value, functools.partial(setattr, cell, "value")


def classify_result(
    leaf: Any,
    before: Sequence[Any],
    arguments: Sequence[Any],
    made_here: Callable[[Tensor], bool],
    device: torch.device,
) -> Result | str:
    """Classify one leaf of a result that a warmup saw; return the problem if no graph can use it.

    Args:
        leaf: one leaf of the break's result.
        before: the leaves before it.
        arguments: the leaves of the break's arguments.
        made_here: returns True if the forward made a tensor's memory.
        device: the device of the graph.
    """
    index = next((index for index, argument in enumerate(arguments) if argument is leaf), None)
    if issubclass(type(leaf), ATOMS):
        return Result(_constant, (leaf,), any_size=leaf is None)
    if index is not None:
        return Result(pass_back, (index,), any_size=True)
    if not issubclass(type(leaf), Tensor):
        if issubclass(type(leaf), (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
            return "returns a generator, whose body would run after it"
        return Result(hand_on, (type(leaf),))
    if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
        return f"returns a {type(leaf).__name__} of layout {leaf.layout}; return plain strided tensors"
    if leaf.device != device:
        return f"returns a tensor on {leaf.device}, which a graph on {device} cannot follow"
    shared = next((index for index, argument in enumerate(arguments) if memory_of(argument) == storage_key(leaf)), None)
    if shared is not None:
        if arguments[shared].dtype is not leaf.dtype or leaf.is_conj() or leaf.is_neg():
            return "returns its argument seen as another dtype; return a clone"
        offset = int(leaf.storage_offset() - arguments[shared].storage_offset())
        return Result(pass_view, (shared,), (tuple(leaf.shape), leaf.stride(), offset))
    if not made_here(leaf):
        return Result(_outside, (leaf,))
    if any(memory_of(other) == storage_key(leaf) and _overlap(other, leaf) for other in before):
        return "returns tensors that overlap in memory; return clones"
    dense = torch.empty_like(leaf, device="meta")
    return Result(_bridge, (leaf.dtype, leaf.device), (tuple(dense.shape), dense.stride()))


def memory_of(leaf: Any) -> int:
    """Return the storage key of a strided tensor; 0 for other values."""
    return storage_key(leaf) if issubclass(type(leaf), Tensor) and leaf.layout is torch.strided else 0


def _overlap(one: Tensor, other: Tensor) -> bool:
    """True if two tensors of one storage have an element in common."""
    if one.dtype is not other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.uint8, device="cpu")
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(1)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def shown(leaf: Any) -> str:
    """Describe a leaf of a result for messages."""
    if issubclass(type(leaf), Tensor):
        layout = "" if leaf.layout is torch.strided else f", {leaf.layout}"
        return f"a tensor of shape {tuple(leaf.shape)}, {leaf.dtype}{layout}, on {leaf.device}"
    return repr(leaf) if issubclass(type(leaf), ATOMS) else f"a {type(leaf).__name__}"
