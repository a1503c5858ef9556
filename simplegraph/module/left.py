"""Find what runs of a forward change below its module: Python state (``self.calls += 1``) and tensors that they leave.

No replay runs Python. But tensors that a run leaves, as ``self.last_attention = attention`` does, are further outputs
of a graph: after each replay the places are bound to them again, as eager would do it. That is for places which every
run writes before it reads them. State carried from call to call, such as ``self.state = cell(x, self.state)``, is none
of these: a graph would read what it held at the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from simplegraph.errors import CaptureError
from simplegraph.graph.escapes import KEPT_REMEDY
from simplegraph.graph.generators import HostRandom
from simplegraph.graph.places import put
from simplegraph.module.outputs import OutputShapes, unreturnable
from simplegraph.module.snapshot import Snapshot
from simplegraph.module.watched import WATCHED, HeldPlace, WatchedAttribute, is_watchable, swapped
from simplegraph.nested import TreeSpec, containers, flatten
from simplegraph.reasons import CannotBind

_MAX_SEEN = 64  # kinds of what eager runs left in one place: beyond that it changes at every call


class WithLeft(NamedTuple):
    """Holds what a run returns, and what it leaves below its module, in the order of its places."""

    result: Any
    left: tuple[Any, ...]


class LeftPlaces:
    """Lists the places where the runs of a graph leave tensors.

    Args:
        groups: places that hold one value, the very same object.
    """

    def __init__(self, groups: Sequence[Sequence[HeldPlace]]) -> None:
        self.groups = groups

    def bind(self, whole: WithLeft) -> Any:
        """Leave what a run leaves; return what it returns."""
        for places, value in zip(self.groups, whole.left, strict=True):
            for place in places:
                place.holder[place.key] = value
        return whole.result

    def gather(self, result: Any) -> WithLeft:
        """Find what an eager run that returned `result` left."""
        return WithLeft(result, tuple(_held(places[0]) for places in self.groups))


class _Candidate:
    """A place where the first eager run left tensors, and how they follow the batch size.

    Attributes:
        seen: what eager runs left, but for the tensors.
    """

    def __init__(self, place: HeldPlace) -> None:
        self.place = place
        self.seen: set[Any] = set()
        self.shapes = OutputShapes()
        self.error: CannotBind | None = None

    def look(self) -> None:
        if len(self.seen) < _MAX_SEEN:
            self.seen.add(_plain(_held(self.place)))

    def learn(self, size: int, value: Any) -> None:
        leaves, spec = flatten(value)
        try:
            self.shapes.learn(size, leaves, spec)
        except CannotBind as error:
            self.error = error.again()

    def cut(self, leaves: Sequence[Any], rows: int, padded: int) -> list[Any]:
        if self.error is not None and rows != padded:
            raise self.error.again()
        return self.shapes.cut(leaves, rows, padded)


class LeftState:
    """Learns from eager runs where a forward leaves tensors below its module, and takes them from captured runs."""

    def __init__(self) -> None:
        self._candidates: dict[tuple[int, Any], _Candidate] = {}
        self._places: dict[Hashable, LeftPlaces] = {}

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def note(self, before: Snapshot) -> None:
        """Note where a run left tensors."""
        changed = [place for place, _, now in before.changed_places() if _is_leavable(now) and is_watchable(place)]
        self._candidates = {(id(place.holder), place.key): _Candidate(place) for place in changed}
        self.look()

    def look(self) -> None:
        """Note what else an eager run left with the tensors."""
        for candidate in self._candidates.values():
            candidate.look()

    def learn(self, size: int) -> None:
        """Learn what an eager run of this batch size left."""
        for candidate in self._candidates.values():
            candidate.learn(size, _held(candidate.place))

    def of(self, graph: Hashable) -> LeftPlaces:
        """Return the places where the replays of a graph, known by its key, leave tensors."""
        return self._places[graph]

    @property
    def links(self) -> Iterator[tuple[Any, Any, Any]]:
        """List what is on the way to the places of all graphs: (container, key, value)."""
        return (link for known in self._places.values() for group in known.groups for p in group for link in p.links)

    def learn_captured(self, graph: Hashable, size: int, left: Sequence[Any]) -> None:
        """Learn what a captured run of this batch size leaves."""
        for candidate, value in zip(self._candidates_of(graph), left, strict=True):
            candidate.learn(size, value)

    def cut(
        self, graph: Hashable, leaves: Sequence[Any], specs: Sequence[TreeSpec], rows: int, padded: int
    ) -> list[Any]:
        """View the real rows of what a padded run left, nested like `specs`. Raises CannotBind."""
        found: list[Any] = []
        for candidate, spec in zip(self._candidates_of(graph), specs, strict=True):
            found += candidate.cut(leaves[len(found) : len(found) + spec.num_leaves], rows, padded)
        return found

    def _candidates_of(self, graph: Hashable) -> list[_Candidate]:
        """The candidate of each value that a graph leaves."""
        firsts = (group[0] for group in self._places[graph].groups)
        return [self._candidates[id(place.holder), place.key] for place in firsts]

    def take(self, graph: Hashable, label: str, watch: RunWatch, result: Any, arguments: Any) -> Any:
        """Take what a captured run left beside its result, if a replay can leave it; all else stays, and is refused."""
        taken = watch.take(label, result, arguments)
        if taken is None:
            return result
        self._places[graph], whole = taken
        return whole

    @contextlib.contextmanager
    def watching(self, before: Snapshot, *, may_leave: bool) -> Iterator[RunWatch]:
        """Watch what the run in here reads of these places, if it may leave tensors; `before` is taken before it."""
        watch = RunWatch(list(self._candidates.values()))
        try:
            with watch:
                yield watch
        finally:
            if may_leave:
                watch.look(before)


class RunWatch:
    """Watches which of some places a run reads before it writes them.

    Args:
        candidates: where an earlier run left tensors.

    Attributes:
        found: the places that hold tensors of the run, with what they held and hold; empty if one must not be bound.
    """

    def __init__(self, candidates: Sequence[_Candidate]) -> None:
        self._seen = {(id(known.place.holder), known.place.key): known.seen for known in candidates}
        self._places = [known.place for known in candidates]
        self.found: list[tuple[HeldPlace, Any, Any]] = []
        self._known: set[int] = set()
        self._others: set[str] = set()

    def __enter__(self) -> RunWatch:
        self._undo = contextlib.ExitStack()
        attributes = {(type(place.owner), place.key) for place in self._places if place.owner is not None}
        self._attributes = {key: WatchedAttribute(*key) for key in attributes}
        held = {id(place.holder): place for place in self._places if place.owner is None}
        self._containers: dict[int, Any] = {}
        try:
            for attribute in self._attributes.values():
                self._undo.enter_context(attribute)
            for key, place in sorted(held.items(), key=lambda entry: -len(entry[1].links)):  # the inner ones first
                self._containers[key] = WATCHED[type(place.holder)](place.holder)
                self._undo.enter_context(swapped(place, self._containers[key]))
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def _only_written(self, place: HeldPlace) -> bool:
        """True if the run was seen to write a place, and not to read it before."""
        if place.owner is None:
            watched = self._containers.get(id(place.holder))
            return watched is not None and place.key in watched.written - watched.read
        attribute = self._attributes.get((type(place.owner), place.key))
        return attribute is not None and id(place.owner) in attribute.written - attribute.read

    def look(self, before: Snapshot) -> None:
        """Find what the run left."""
        changed = before.changed_places()
        self.found = [entry for entry in changed if next(_tensors(entry[2]), None) is not None]
        self._others = {place.name for place, _, now in changed if next(_tensors(now), None) is None}
        self._known = before.container_ids
        for place, _, now in self.found:
            seen = self._seen.get((id(place.holder), place.key), ())
            if not (self._only_written(place) and _is_leavable(now) and _plain(now) in seen):
                self.found = []  # then it is refused for what it keeps
                return

    @property
    def names(self) -> set[str]:
        """The names of the places, as `Snapshot.changes` gives them."""
        return {place.name for place, _, _ in self.found} - self._others

    def take(self, label: str, result: Any, arguments: Any) -> tuple[LeftPlaces, WithLeft] | None:
        """Take what the run of a size left, and let the places hold what they held.

        Returns:
            The places, and what is theirs; None if there is nothing.

        Raises:
            CaptureError: something else holds the same containers.
        """
        if not self.found:
            return None
        names, found, self.found = self.names, self.found, []
        groups: dict[int, list[HeldPlace]] = {}
        values = {}
        for place, _, now in found:
            groups.setdefault(id(now), []).append(place)
            values[id(now)] = now
        seen = {*self._known, *map(id, containers(result)), *map(id, containers(arguments))}
        for value in values.values():
            own = {id(container) for container in containers(value)}
            if not seen.isdisjoint(own) or len(own) != len(containers(value)):
                cause = f"{', '.join(sorted(names))} would keep a container that is also held or returned elsewhere"
                raise CaptureError(f"capturing {label} failed\n  {cause}.\n  {KEPT_REMEDY}", cause=cause)
            seen |= own
        for place, then, _ in found:
            put(place.holder, place.key, then)
        return LeftPlaces(list(groups.values())), WithLeft(result, tuple(values.values()))


def _held(place: HeldPlace) -> Any:
    try:
        return place.holder[place.key]
    except LookupError:
        return None


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def _is_leavable(value: Any) -> bool:
    """True if a value is made of tensors and plain values, so that it can be made again of others."""
    leaves, _ = flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return bool(tensors) and unreturnable(leaves) is None and all(type(tensor) is Tensor for tensor in tensors)


def _plain(value: Any) -> tuple[Any, ...]:
    """Describe all about a value but its tensors."""
    leaves, spec = flatten(value)
    return spec, *((Tensor if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))) for leaf in leaves)


class CountedState:
    """Finds what the first eager run of a signature changed below the module, and its first captured run, too.

    A cache that is filled once is changed by the first alone; what eager breaks change, by eager runs alone.

    Attributes:
        names: the places, dotted from the module; None before the first capture.
        left: the places where runs leave tensors, which replays can do, too.
    """

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self.left = LeftState()
        self._changed: set[str] | None = None

    @contextlib.contextmanager
    def eager_run(self, module: Any) -> Iterator[None]:
        """Note what a real run changes, if it is the first: looking costs milliseconds."""
        before = (Snapshot(module, tensors=False), HostRandom()) if self._changed is None else None
        yield
        if before is not None:
            snapshot, host = before
            self._changed = snapshot.changed_names() | host.drawn()
            self.left.note(snapshot)
        else:
            self.left.look()

    @contextlib.contextmanager
    def captured_run(
        self, module: Any, state_key: Callable[[Any], Any] | None, *, may_leave: bool = True
    ) -> Iterator[RunWatch | None]:
        """Find what a captured run changes as well, but for what changes `state_key`: then the caller knows of it.

        Args:
            module: whose run it is.
            state_key: of the configuration.
            may_leave: replays can leave tensors where the run does.

        Yields:
            What watches where it leaves tensors.
        """
        if not self._changed or (self.names is not None and not self.left):
            yield None
            return
        before, key = Snapshot(module, tensors=False), state_key and state_key(module)
        host = HostRandom()
        complete = False
        try:
            with self.left.watching(before, may_leave=may_leave) as watch:
                yield watch
            complete = True
        finally:
            in_key = state_key is not None and state_key(module) != key
            names = [] if in_key else sorted((self._changed & (before.changed_names() | host.drawn())) - watch.names)
            if complete or names:  # a capture that failed may not have come to what changes
                self.names = sorted({*(self.names or ()), *names})

    def look_again(self) -> None:
        """Let the next eager run find what it changes: that may be another object by now, or other code."""
        self._changed, self.names, self.left = None, None, LeftState()

    @property
    def refusal(self) -> tuple[str, str]:
        """Say why there can be no graph, and what to do."""
        cause = (
            f"{', '.join(self.names or [])} changes whenever the forward runs, in Python, and a replay runs no Python"
        )
        return cause, "Keep it in a buffer that the forward writes in place, or change it outside the forward."
