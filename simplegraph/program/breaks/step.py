"""Breaks: calls of them in a warmup, and steps of a Program that call the function at every replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from simplegraph.base.errors import BreakError
from simplegraph.base.modes import SavedModes
from simplegraph.base.nested import ATOMS, TreeSpec, constant_key, flatten

Accept = Callable[[Any], str | None]


@dataclasses.dataclass(eq=False)
class Cell:
    """Holds an object that a break replaces at each replay and later breaks read."""

    value: Any


class Place(NamedTuple):
    """Describes a capture to the stand-ins for a break's results that enter it.

    Attributes:
        leaves: the arguments of the break, taken apart, as the forward passed them.
        held: the same as every replay will pass them.
        keep: returns a captured tensor as steps may hold it.
        cells: what later breaks read in place of an object, by the id of what it is now.
    """

    leaves: Sequence[Any]
    held: Sequence[Any]
    keep: Callable[[Tensor], Tensor]
    cells: dict[int, Cell]


class Result(NamedTuple):
    """One leaf of what a break returns.

    Attributes:
        make: returns what the forward goes on with, and what takes a replay's value and says what is wrong with it.
        fixed: its first arguments, which are the same at every batch size.
        geometry: its next ones, in nested tuples, whose integers may follow the batch size; the last is a `Place`.
        any_size: True if it is known to be the same for every batch size.
    """

    make: Callable[..., tuple[Any, Accept]]
    fixed: tuple[Any, ...]
    geometry: tuple[Any, ...] = ()
    any_size: bool = False

    def enter(self, place: Place) -> tuple[Any, Accept]:
        """Return what stands in for it in a capture, and what takes it at a replay."""
        return self.make(*self.fixed, *self.geometry, place)


class BreakCall(NamedTuple):
    """Record what a warmup saw of one call of a break.

    Attributes:
        function: what was called.
        made_here: for each leaf of the arguments, True if it is a tensor that the forward made.
        spec, results: how the result nests, and what its leaves are.
        problem: why no graph can have this break; None if it can.
    """

    function: Callable[..., Any]
    made_here: tuple[bool, ...]
    spec: TreeSpec
    results: tuple[Result, ...]
    problem: str | None = None

    @property
    def any_size(self) -> bool:
        """True if it is known what the break returns at other batch sizes."""
        return self.problem is None and all(result.any_size for result in self.results)


@dataclasses.dataclass
class BreakTrace:
    """The breaks of a forward, as a warmup met them.

    Attributes:
        operators: operators that break by themselves.
        calls: in the order of the forward.
    """

    operators: frozenset[Any]
    calls: list[BreakCall] = dataclasses.field(default_factory=list)

    @property
    def any_size(self) -> bool:
        """True if captures of other batch sizes can go by it."""
        return all(call.any_size for call in self.calls)


def trace_between(one: tuple[int, BreakTrace], other: tuple[int, BreakTrace], rows: int) -> BreakTrace | None:
    """Find what breaks return at a batch size from traces at two others, each given with its rows.

    Returns:
        None if the traces differ by more than sizes that are equal, or proportional to the rows.
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
            if result.make is not same.make or geometry is None or not all(map(_same, result.fixed, same.fixed)):
                return None
            results.append(result._replace(geometry=geometry))
        calls.append(call._replace(results=tuple(results)))
    return BreakTrace(first.operators, calls)


def _same(one: Any, other: Any) -> bool:
    plain = isinstance(one, ATOMS) and type(one) is type(other)
    return one is other or (plain and constant_key(one) == constant_key(other))


def _follow(one: Any, other: Any, sizes: tuple[int, int], rows: int) -> Any:
    """Return a geometry at `rows` rows from those at two sizes; None if they differ otherwise."""
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        parts = [_follow(*pair, sizes, rows) for pair in zip(one, other, strict=True)]
        return None if None in parts else tuple(parts)
    if type(one) is int and type(other) is int and one != other:
        a, b = sizes
        return one // a * rows if one * b == other * a and one % a == 0 else None
    return one if one == other else None


class RebuiltCall(NamedTuple):
    """Arguments that every replay builds again: among them are containers of graph memory, or cells."""

    spec: TreeSpec
    leaves: Sequence[Any]

    def value(self) -> Any:
        """Build what this replay passes: positional arguments, and those by name."""
        return self.spec.unflatten([leaf.value if isinstance(leaf, Cell) else leaf for leaf in self.leaves])


@dataclasses.dataclass(eq=False)
class Break:
    """A call that runs eagerly at every replay.

    Attributes:
        name: what reports call it.
        function: what is called.
        args, kwargs: what with; graph memory among them is borrowed.
        rebuilt: makes `args` and `kwargs` for each replay; None if they stay the same.
        modes: grad mode, inference mode and autocast around the call, where the forward sets any.
        spec, accepts: how the result nests, and what takes each of its leaves; set when the capture knows.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rebuilt: RebuiltCall | None
    modes: SavedModes | None
    spec: TreeSpec | None = None
    accepts: list[Accept] = dataclasses.field(default_factory=list)

    def replay(self) -> None:
        """Call the function, and put what it returns where the next segment reads it.

        Raises:
            BreakError: the result is not what the next segment was captured with.
        """
        args, kwargs = self.rebuilt.value() if self.rebuilt else (self.args, self.kwargs)
        if self.modes is None:
            self._take(self.function(*args, **kwargs))
        else:
            with self.modes.restored():
                self._take(self.function(*args, **kwargs))

    def _take(self, result: Any) -> None:
        leaves, spec = flatten(result)
        if spec != self.spec:
            raise self._refused(f"{_nesting(spec)} where it returned {_nesting(self.spec)} before")
        for accept, leaf in zip(self.accepts, leaves, strict=True):
            problem = accept(leaf)
            if problem is not None:
                raise self._refused(problem)

    def _refused(self, problem: str) -> BreakError:
        return BreakError(
            f"eager break {self.name} returned {problem}.\n"
            "  The segments after it were captured for results of one structure, shape and dtype, and did not run. "
            "Return the same each time, or capture again with reset_graphs()."
        )


def _nesting(spec: TreeSpec | None) -> str:
    if spec is None or spec.type is None:
        return "one value"
    return f"a {spec.type.__name__} of {len(spec.children)}"
