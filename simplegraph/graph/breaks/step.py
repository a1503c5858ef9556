"""A break as a Program keeps it: the function, its arguments, and where its results go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from simplegraph.errors import BreakError
from simplegraph.graph.breaks.results import Accept, Cell
from simplegraph.nested import TreeSpec, flatten


class Modes(NamedTuple):
    """What a forward switches on around an operation, and a replay must switch on again."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """Those in force in this thread."""
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def changed_from(self, ambient: Modes) -> frozenset[str]:
        """What the forward itself changed; for the others the modes around a replay are right."""
        changed = {name for name in ("inference", "autocast") if getattr(self, name) != getattr(ambient, name)}
        return frozenset(changed | ({"grad"} if self.grad and not ambient.grad else set()))


class SavedModes(NamedTuple):
    """The modes around a break, of which the forward itself set some."""

    modes: Modes
    changed: frozenset[str]
    device_type: str

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Those again, inside whatever is around the replay."""
        modes, changed = self.modes, self.changed
        with contextlib.ExitStack() as stack:
            if "inference" in changed:
                stack.enter_context(torch.inference_mode(modes.inference))
            if "grad" in changed or "inference" in changed:  # leaving inference mode switches grad mode on
                stack.enter_context(torch.set_grad_enabled(modes.grad))
            if "autocast" in changed:
                enabled = modes.autocast is not None
                stack.enter_context(torch.autocast(self.device_type, dtype=modes.autocast, enabled=enabled))
            yield


class RebuiltArgument(NamedTuple):
    """An argument that is put together anew for every replay: a container of graph memory, or of cells."""

    place: int | str
    spec: TreeSpec
    leaves: Sequence[Any]

    def value(self) -> Any:
        """What this replay passes."""
        return self.spec.unflatten([leaf.value if isinstance(leaf, Cell) else leaf for leaf in self.leaves])


class Break:
    """A call that runs eagerly at every replay.

    Args:
        name: what reports call it.
        function: what is called.
        args, kwargs: what with; graph memory among them is borrowed.
        rebuilt: arguments that replace those of `args` and `kwargs` in their place, made anew each time.
        inside: grad mode, inference mode and autocast around the call, where the forward sets any.

    Attributes:
        spec, accepts: how the result nests, and what takes each of its leaves; set when the capture knows.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rebuilt: Sequence[RebuiltArgument],
        inside: SavedModes | None,
    ) -> None:
        self.name = name
        self.spec: TreeSpec | None = None
        self.accepts: list[Accept] = []
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._rebuilt = rebuilt
        self._inside = inside

    def replay(self) -> None:
        """Call the function, and put what it returns where the next segment reads it.

        Raises:
            BreakError: the result is not what the next segment was captured with.
        """
        args, kwargs = self._arguments() if self._rebuilt else (self._args, self._kwargs)
        if self._inside is None:
            self._take(self._function(*args, **kwargs))
        else:
            with self._inside.restored():
                self._take(self._function(*args, **kwargs))

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = list(self._args), dict(self._kwargs)
        for argument in self._rebuilt:
            if isinstance(argument.place, int):
                args[argument.place] = argument.value()
            else:
                kwargs[argument.place] = argument.value()
        return args, kwargs

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
            "Return the same each time, or capture anew with reset_graphs()."
        )


def _nesting(spec: TreeSpec | None) -> str:
    if spec is None or spec.type is None:
        return "one value"
    return f"a {spec.type.__name__} of {len(spec.children)}"
