"""Runs of a module whose effects are compared: a call as it is, and a rehearsal of its padded form, which is undone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.context import bypassed
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.operators import strided_tensors, written_args
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import parts, storage_key
from simplegraph.call.call import invoke
from simplegraph.device.generators import default_generator, random_states
from simplegraph.device.memory import SavedMemory, copy_limit, remember
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.select import graph_device
from simplegraph.guard.survey import Survey, held_tensors
from simplegraph.manager.differences import cloned, first_difference
from simplegraph.program.held import has_address, tensors_in
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.snapshot import Snapshot


@dataclasses.dataclass
class RunEffects:
    """The effects of a run: what it returned and did.

    Attributes:
        leaves, spec: of its outputs; outputs: these themselves, None of a rehearsal.
        left: tensors that it set below the module, by name.
        drawn: the states of random generators after it.
        arguments: the leaves of what was passed, as it left them.
    """

    leaves: list[Any]
    spec: TreeSpec
    outputs: Any
    left: dict[str, list[Tensor]]
    drawn: list[Tensor]
    arguments: list[Any] = dataclasses.field(default_factory=list)

    def left_otherwise(self, other: RunEffects) -> set[str]:
        """Name what this run and another set, and to something else."""
        names = self.left.keys() & other.left.keys()
        return {name for name in names if first_difference(self.left[name], other.left[name]) is not None}

    def drew_as(self, other: RunEffects) -> bool:
        """True if random generators are as after another run."""
        return all(torch.equal(*pair) for pair in zip(self.drawn, other.drawn, strict=True))


def run_as_it_is(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> RunEffects:
    """Run the module on these arguments."""
    snapshot = Snapshot(module)
    outputs = invoke(module, args, kwargs)
    drawn = random_states([default_generator(device), *Survey(module).generators.values()])
    return RunEffects(*flatten(outputs), outputs, _left(snapshot), drawn)


def rehearse(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> RunEffects:
    """Run the module on these arguments, and put back what that changed: memory, random numbers, Python's objects."""
    held: dict[int, tuple[str, Tensor]] = {}
    passed = [("an argument", tensor) for tensor in tensors_in(flatten((args, kwargs))[0])]
    for name, tensor in [*((entry.name, entry.tensor) for entry in held_tensors(module)), *passed]:
        for part in parts(tensor):
            if has_address(part) and not isinstance(part, nn.Parameter):
                held.setdefault(storage_key(part), (name, part))
    saved = SavedMemory((), held.values())
    fits = saved.nbytes <= copy_limit(graph_device(device).free_memory())
    drawing = [default_generator(device), *Survey(module).generators.values()]
    generators = tuple(dict.fromkeys((*drawing, torch.default_generator)))
    with CAPTURE_LOCK, remember(saved if fits else None, generators) as undo:
        snapshot = Snapshot(module)
        undo.callback(snapshot.put_back)
        with bypassed(Reason.NESTED), WriteSaver(held if fits else (), undo):
            leaves, spec = flatten(invoke(module, args, kwargs))
        left = {name: cloned(tensors) for name, tensors in _left(snapshot).items()}
        passed_on = cloned(flatten((args, kwargs))[0])
        return RunEffects(cloned(leaves), spec, None, left, random_states(drawing), passed_on)


class WriteSaver(MemoryObserver):  # type: ignore[no-untyped-call]
    """Copies memory from before the run once an operator is about to write to it.

    Args:
        saved: storage keys of memory that has been copied.
        undo: puts the copies back.
        rows: the batch size of the run; 0 if it is not known.
    """

    def __init__(self, saved: Iterable[int], undo: contextlib.ExitStack, rows: int = 0) -> None:
        super().__init__(rows=rows)
        self._saved, self._undo = set(saved), undo

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator when what it writes to is copied."""
        for tensor in strided_tensors(tuple(written_args(func, args, kwargs))):
            if storage_key(tensor) not in self._saved and not self.made(tensor):
                self._saved.add(storage_key(tensor))
                memory = SavedMemory([("", tensor)])
                self._undo.callback(memory.put, memory.copy())
        return super().run(func, args, kwargs)


def _left(snapshot: Snapshot) -> dict[str, list[Tensor]]:
    found = ((name, list(tensors_in(value))) for name, value in snapshot.changes().items())
    return {name: tensors for name, tensors in found if tensors}
