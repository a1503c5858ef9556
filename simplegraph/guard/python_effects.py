"""Find the Python state that a run of a module changes, and undo the changes of captures."""

from __future__ import annotations

import contextlib
import functools
import operator
import pickle
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from simplegraph.base.failures import MODE_OUTSIDE
from simplegraph.base.nested import ATOMS
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.device.saved_state import HostRandom, is_global_generator
from simplegraph.guard.carried import CarriedPlace, PlacesFoundError, places_in
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.scripted import scripted_state
from simplegraph.program.escapes import PythonState, holds_graph_memory, quoted
from simplegraph.program.probes import Run, Undone
from simplegraph.program.snapshot import ABSENT, Snapshot, in_memory, is_same

_MAX_BYTES = 1 << 20  # the size of the largest byte strings and arrays that are compared


class ModuleState(PythonState):
    """Saves the Python state of a module before captures, and finds places that hold graph memory after them.

    Args:
        module: the module.
        device, pool: the device and the pool of the captures.
        repeated: state that every run of the module changes.
        inputs: storage keys of the static inputs, which no place may keep.
        retry: True to repeat a recording that leaves tensors, after a warmup, which may fill a cache.
        passes_carried: True if calls can pass the tensors that runs leave in attributes (see `carried`).
    """

    def __init__(
        self,
        module: nn.Module,
        device: GraphDevice,
        pool: GraphPool,
        repeated: RepeatedChanges,
        inputs: Collection[int],
        *,
        retry: bool,
        passes_carried: bool,
    ) -> None:
        super().__init__([module])
        self._module, self._passes_carried = module, passes_carried
        if passes_carried:
            self.kept_remedy = (
                "Return it instead, or keep it in an attribute of a module, alone or in a tuple, with no list, dict or "
                "object around it: self.last = tensor, self.state = (h, c)."
            )
        # By their dotted names, the attributes that a recording left tensors in.
        self._carried_places: dict[str, CarriedPlace] = {}
        self._tried: set[str] | None = set() if retry else None  # labels of recordings that left tensors
        self._device, self._pool, self._repeated = device, pool, repeated
        self._is_input = functools.partial(in_memory, lambda part: storage_key(part) in inputs)

    @property
    def refuses(self) -> bool:  # type: ignore[override]
        """True if the forward changes Python state at every run."""
        return bool(self._repeated.names)

    @property
    def sets_flags(self) -> bool:  # type: ignore[override]
        """True if recordings set done flags. Changes at every run, or in `state_key`, set none."""
        return not self._repeated.names and not self._repeated.in_key and super().sets_flags

    def put_back(self) -> list[str]:
        changes = self.snapshot.changes()
        if changes and self._passes_carried:
            self._carried_places |= {name: place for name, place in places_in(self._module).items() if name in changes}
        kept = [name for name in changes if holds_graph_memory(changes[name], self._device, self._pool)]
        self.put_back_flags()
        self.snapshot.put_back(self._repeated.undone)
        kept += self.snapshot.release(self._is_input, caches=False)
        return _names_in_code(self._module, kept)

    def note_kept(self, run: Run, names: Sequence[str]) -> None:
        """Pass the places as inputs of calls, if all are attributes of modules and the recording was repeated.

        Raises:
            PlacesFoundError: calls can pass the places.
        """
        if self._tried is None or run.label in self._tried:
            self.check_carried(names)
        else:
            self._tried.add(run.label)

    def check_carried(self, names: Sequence[str]) -> None:
        """Raise a PlacesFoundError if calls can pass the tensors in the places of these names."""
        if self._carried_places.keys() >= set(names):
            places = [self._carried_places[name] for name in names]
            self.undo(Undone.SECOND_TRY, ())
            raise PlacesFoundError(places)


class PythonEffects:
    """Saves Python state that a run may change: a module's, numbers that code names, generators and positions.

    A capture cannot undo changes of positions (of Python generators, iterators and files), byte strings and arrays on
    the host. Such objects are found if a function names them, or if an object or a class holds them.
    """

    def __init__(self, module: Any) -> None:
        self._snapshot = Snapshot(module, *type(module).__mro__, tensors=False, code=True, breaks=False)
        self._random, things = HostRandom(), [thing for thing, *_ in self._snapshot.walk.ways.values()]
        readers = {kind: _reader_of(kind) for kind in {*map(type, things)}}
        readable = (
            (thing, read) for thing in things if (read := readers[type(thing)]) and not is_global_generator(thing)
        )
        self._positions = [(thing, read, at) for thing, read in readable if (at := _position(thing, read)) is not None]

    def changed(self) -> set[str]:
        """Name the places that changed."""
        return self._snapshot.changes(code=True).keys() | self._random.drawn() | self.advanced()

    def put_back(self) -> set[str]:
        """Restore containers and numbers, and return the names of the places that changed."""
        changed = self.changed()
        self._snapshot.put_back(changed)
        return changed

    def advanced(self) -> set[str]:
        """Return the names of objects whose positions changed."""
        changed = (thing for thing, read, before in self._positions if not is_same(_position(thing, read), before))
        return set(map(self._snapshot.walk.path, changed))


def _position(value: Any, read: Callable[[Any], Any]) -> Any:
    """Return the position of a generator, an iterator or a file; None if it cannot be read."""
    with contextlib.suppress(Exception):  # a closed file, the system's random generator
        return read(value)
    return None


def _reader_of(kind: type) -> Callable[[Any], Any] | None:
    if kind.__module__ == "builtins" and hasattr(kind, "__length_hint__"):
        return operator.length_hint
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_READERS[name] for name in names if name in _READERS), None)


def _pickled(value: Any) -> bytes | None:
    return pickle.dumps(value) if max(sys.getsizeof(value), getattr(value, "nbytes", 0)) <= _MAX_BYTES else None


def _progress(made: types.GeneratorType[Any, Any, Any]) -> tuple[Any, ...]:
    frame: Any = made.gi_frame  # None once it has ended
    return frame.f_lasti, *(value for value in frame.f_locals.values() if issubclass(type(value), ATOMS))


_READERS: dict[str, Callable[[Any], Any]] = {
    "random.Random": _pickled,
    "numpy.random._generator.Generator": _pickled,
    "numpy.random.mtrand.RandomState": _pickled,
    "numpy.random.bit_generator.BitGenerator": _pickled,
    "numpy.random.bit_generator.SeedSequence": _pickled,
    "numpy.ndarray": _pickled,
    "array.array": _pickled,
    "builtins.bytearray": _pickled,
    "itertools.count": repr,
    "builtins.generator": _progress,
    "_contextvars.ContextVar": lambda variable: (variable.get(ABSENT),),
    "_io._IOBase": operator.methodcaller("tell"),
    "_queue.SimpleQueue": operator.methodcaller("qsize"),
    "threading.Event": operator.methodcaller("is_set"),
    "threading.Semaphore": operator.attrgetter("_value"),
    "_hashlib.HASH": operator.methodcaller("digest"),
    "torch.ScriptModule": scripted_state,
}


class RepeatedChanges:
    """Finds the Python state of a module that every run changes, such as a counter.

    A change is repeated if both the first eager run and the first captured run of a size make it: not the filling of a
    cache by the first run alone, nor a change by an eager break, which captured runs do not run. Positions, which no
    capture could undo, are compared at eager runs only, until a run leaves them unchanged.

    Attributes:
        names: the dotted names of the places that every run changes; None before the first capture.
        in_key: True if the first captured run changed `state_key`.
        advanced: names of objects whose positions the latest eager run changed.
    """

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self.in_key = False
        self.advanced: set[str] = set()
        self._always: set[str] = set()  # names of objects that two eager runs in a row advanced
        self._changed: set[str] | None = None

    @property
    def watched(self) -> bool:
        """True once the changes of an eager run are known."""
        return self._changed is not None

    def check(self, module: Any) -> None:
        """Refuse to record a forward that advances positions at every run. Raises CannotBind."""
        if self._always:
            raise CannotBind(Reason.PYTHON_STATE, ", ".join(_names_in_code(module, sorted(self._always))))

    @contextlib.contextmanager
    def eager_run(self, module: Any) -> Iterator[None]:
        """Note the changes of the first real run in the block; others are not compared, which takes milliseconds."""
        if self._changed is not None and not self.advanced:
            yield
            return
        run = PythonEffects(module)
        yield
        before, self.advanced = self.advanced, run.advanced()
        self._always = before & self.advanced
        self._changed = run.changed() if self._changed is None else self._changed

    @contextlib.contextmanager
    def captured_run(self, module: Any, state_key: Callable[[Any], Any] | None) -> Iterator[None]:
        """Find the places that a captured run changes as well. Changes of `state_key` are allowed: the caller chose it.

        Args:
            module: the module.
            state_key: the configuration's `state_key`.
        """
        if not self._changed or self.names is not None:
            yield
            return
        run, key = PythonEffects(module), state_key and state_key(module)
        complete = False
        try:
            yield
            complete = True
        finally:
            self.in_key = state_key is not None and state_key(module) != key
            names = [] if self.in_key else sorted(self._changed & run.changed())
            if complete or names:  # a failed capture may have stopped before the changes
                self.names = sorted({*(self.names or ()), *names})

    @property
    def undone(self) -> Collection[str]:
        """Return the names of places to restore after a capture; none if a graph can serve the module."""
        return () if self.names == [] else {*(self._changed or ()), *(self.names or ())}

    def refusal(self, module: Any) -> tuple[str, str]:
        """Return why the module can have no graph, and the remedy."""
        names = quoted(_names_in_code(module, self.names or []))
        cause = f"the forward changes {names} whenever it runs, and a replay runs no Python"
        places = {name.rpartition(".")[2] if name.endswith(".training") else name for name in self.names or ()}
        if places == {"training"}:
            return cause, MODE_OUTSIDE
        if places <= places_in(module).keys():
            return cause, (
                "Return the tensor, with the result, in place of keeping it there. One that needs no gradient, such as "
                "a running mean, may be written into a buffer: self.mean.copy_(mean)."
            )
        return cause, (
            "Keep a number in a buffer that the forward writes in place; do all else outside the forward, and pass "
            "what comes of it as a tensor."
        )


def _names_in_code(module: Any, names: Iterable[str]) -> list[str]:
    """Return names of places as code has them: without the prefix `reached` in the module of a function."""
    return [name.removeprefix("reached.") for name in names] if isinstance(module, FunctionModule) else [*names]
