"""A file of code that runs twice, once with graphs and once eagerly, changed alike; every difference is raised."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import sys
import threading
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from eager_twin import Raised, difference, outcome
from quiet import quiet
from torch import Tensor, nn

import simplegraph as sg
from tests.fuzz.twins import Different, W

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
STEADY = 8  # calls of one kind after which graphs serve
MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": torch.enable_grad,
    "eager": sg.eager,
}


class StateTwins:
    """Two modules of Python from one source: what one calls `RUN` and `STATE` has graphs, the other's are eager.

    Args:
        source: defines ``make()``, which returns what is called and what changes call ``m``; it wraps with ``WRAP``,
            and marks eager breaks with ``BREAK``.
        form: "module" to wrap what it returns, "mixin" to let its class have graphs; else it does that itself.
        device: where.
        places: expressions of changes, whose values must be the same in both after each call.
        seed: of weights and inputs.
        settings: of the graphs.
    """

    def __init__(
        self, source: str, form: str, device: str, places: tuple[str, ...] = (), seed: int = 0, **settings: Any
    ) -> None:
        self.form, self.device, self.places, self.seed, self.turn = form, torch.device(device), places, seed, 0
        self.sizes = settings.get("capture_sizes", ())
        self.runs: list[Any] = []  # what is called, with graphs first
        self.owners: list[Any] = []  # what has the attributes
        self.files: list[dict[str, Any]] = []
        self.others: list[Any] = [None, None]  # what they were copied from
        self.replayed: list[bool] = []  # by call, or eager raised
        self.quiet = 0  # calls since a change
        for is_graphed in (True, False):
            file = types.ModuleType("program")
            vars(file).update(DEVICE=self.device, WRAP=self._wrapper(is_graphed, settings), this=file)
            vars(file).update(BREAK=sg.eager_break if is_graphed else lambda function: function)
            torch.manual_seed(seed)
            with mock.patch.dict(sys.modules, {file.__name__: file}):  # dataclasses look there
                exec(compile(source, f"<{'graphs' if is_graphed else 'eager'}>", "exec"), vars(file))
            with torch.no_grad():
                run, owner = vars(file)["make"]()
            if is_graphed and form == "module":
                run = owner = sg.wrap(run, progress=False, **settings)
            self.runs.append(run)
            self.owners.append(owner)
            self.files.append(vars(file))

    def _wrapper(self, is_graphed: bool, settings: dict[str, Any]) -> Callable[..., Any]:
        def wrap(function: Any, **more: Any) -> Any:
            if not is_graphed:
                return function
            if self.form == "mixin":
                return type(function.__name__, (sg.CudaGraphWrapper, function), {}, progress=False, **settings)
            if self.form == "step":
                return sg.train_step(function, progress=False, **more)
            return sg.wrap(function, progress=False, **settings)

        return wrap

    @property
    def stats(self) -> Any:
        """Count what became of calls."""
        return self.runs[0].graph_stats

    def call(self, rows: int, mode: str, arguments: str = "") -> None:
        """Call both with the same random rows, and further arguments, written with `this`."""
        self.turn += 1
        results, before = [], self.stats.replays
        for run, file in zip(self.runs, self.files, strict=True):
            torch.manual_seed(self.seed + self.turn)
            x = torch.randn(rows, W, device=self.device)
            more = eval(f"dict({arguments})", file)
            with quiet(), MODES[mode]():
                results.append(outcome(lambda: run(x, **more)))  # noqa: B023
            if isinstance(results[-1], Raised):
                results[-1].error.__traceback__ = None  # its frames hold what is read
        exact = rows in self.sizes or self.form == "step"
        self.quiet += 1
        if _is_unfinished(results[0]):
            raise Unfinished
        self.replayed.append(self.stats.replays > before or isinstance(results[-1], Raised))
        self._raise(difference(*results, rounding=not exact), f"call {self.turn}")
        self._compare(f"after call {self.turn}")

    def change(self, statement: str, how: str = "") -> None:
        """Change both the same way: by another thread, or through ``sg.unwrap``, if `how` says so."""
        refused, self.quiet = [], 0
        for index, (owner, file) in enumerate(zip(self.owners, self.files, strict=True)):
            owner = self.others[index] if "other" in how and self.others[index] is not None else owner
            made: dict[str, Any] = {}
            body = "".join(f"    {line}\n" for line in statement.splitlines())
            exec(compile(f"def change(m):\n{body}", "<change>", "exec"), file, made)
            m = sg.unwrap(owner) if "unwrap" in how and isinstance(owner, sg.CudaGraphWrapper) else owner
            torch.manual_seed(self.seed + self.turn)
            run = lambda change=made["change"], m=m: outcome(lambda: _without_gradients(change, m))  # noqa: E731
            refused.append(_in_thread(run) if "thread" in how else run())
            if isinstance(refused[-1], Raised):
                refused[-1].error.__traceback__ = None
        self._raise(difference(*refused), f"change {statement!r}")
        self._compare(f"after {statement!r}")

    def copy(self) -> None:
        """Go on with deep copies; changes may be of what they were copied from."""
        self.others, self.quiet = self.owners, 0
        self.owners = [copy.deepcopy(owner) for owner in self.owners]
        self.runs = [owner.run if self.form == "holding" else owner for owner in self.owners]

    def serves(self) -> None:
        """Require that the last calls were replays, after enough of them; some of them may be proofs."""
        if self.quiet >= STEADY and not any(self.replayed[-2:]):
            raise Different(f"call {self.turn}: no replay\n{self.runs[0].graph_report()}")

    def _compare(self, where: str) -> None:
        for place in self.places:
            found = [
                _shown(outcome(lambda: eval(place, file | {"m": owner})))  # noqa: B023
                for owner, file in zip(self.owners, self.files, strict=True)
            ]
            self._raise(difference(*found), f"{where}: {place}")

    def _raise(self, found: str | None, where: str) -> None:
        if found is not None:
            raise Different(f"{where}: {found}\n{self.runs[0].graph_report()}")


class Unfinished(Exception):
    """A break set what the forward may read, and the call cannot be finished: it ends in an error, as promised."""


def _is_unfinished(result: Any) -> bool:
    return isinstance(result, Raised) and "This call cannot be finished eagerly: " in str(result.error)


@torch.no_grad()
def _without_gradients(change: Callable[[Any], Any], m: Any) -> None:
    change(m)


def _in_thread(run: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def _shown(value: Any, depth: int = 0) -> Any:
    """Return a value as what can be compared, whichever twin's classes it is of."""
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (Tensor, Raised, *_ATOMS)):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, nn.Module):
        return [type(value).__name__, [_shown(tensor) for tensor in value.state_dict().values()]]
    if depth > 6:
        return type(value).__name__
    if isinstance(value, (set, frozenset)):
        return sorted((_shown(item, depth + 1) for item in value), key=repr)
    if isinstance(value, (list, tuple, collections.deque)):
        return [_shown(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return [[_shown(key, depth + 1), _shown(item, depth + 1)] for key, item in value.items()]
    held = None
    with contextlib.suppress(TypeError):
        held = vars(value)
    if type(held) is dict:
        return [type(value).__name__, _shown(held, depth + 1)]
    return repr(value) if type(value).__module__ in ("decimal", "datetime", "fractions") else type(value).__name__
