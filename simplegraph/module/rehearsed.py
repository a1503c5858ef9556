"""Runs of a module whose effects are compared: a call as it is, and a rehearsal of its padded form, which is undone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.context import bypassed
from simplegraph.graph.device import CAPTURE_LOCK
from simplegraph.graph.generators import HostRandom, default_generator, put_random_states, random_states
from simplegraph.graph.memory import SavedMemory, copy_limit
from simplegraph.graph.select import graph_device
from simplegraph.graph.tensors import parts, storage_key
from simplegraph.manager.differences import cloned, first_difference
from simplegraph.module.call import invoke
from simplegraph.module.snapshot import Snapshot, has_address, tensors_in
from simplegraph.module.survey import Survey, held_tensors
from simplegraph.nested import TreeSpec, flatten
from simplegraph.reasons import Reason


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


def rehearsed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> RunEffects:
    """Run the module on these arguments, and put back what that changed: memory, random numbers, Python's objects."""
    held: dict[int, tuple[str, Tensor]] = {}
    passed = [("an argument", tensor) for tensor in tensors_in(flatten((args, kwargs))[0])]
    for name, tensor in [*((entry.name, entry.tensor) for entry in held_tensors(module)), *passed]:
        for part in parts(tensor):
            if has_address(part) and not isinstance(part, nn.Parameter):
                held.setdefault(storage_key(part), (name, part))
    saved = SavedMemory((), list(held.values()), ())
    drawing = [default_generator(device), *Survey(module).generators.values()]
    generators = _unique([*drawing, torch.default_generator])
    with CAPTURE_LOCK, contextlib.ExitStack() as undo:
        if saved.nbytes <= copy_limit(graph_device(device).free_memory()):
            undo.callback(saved.put, saved.copy())
        undo.callback(put_random_states, generators, random_states(generators))
        undo.callback(HostRandom().put_back)
        snapshot = Snapshot(module)
        undo.callback(snapshot.put_back)
        with bypassed(Reason.NESTED):
            leaves, spec = flatten(invoke(module, args, kwargs))
        left = {name: cloned(tensors) for name, tensors in _left(snapshot).items()}
        passed_on = cloned(flatten((args, kwargs))[0])
        return RunEffects(cloned(leaves), spec, None, left, random_states(drawing), passed_on)


def _left(snapshot: Snapshot) -> dict[str, list[Tensor]]:
    found = ((change.name, list(tensors_in(change.value))) for change in snapshot.changes())
    return {name: tensors for name, tensors in found if tensors}


def _unique(generators: Sequence[torch.Generator]) -> list[torch.Generator]:
    return list({id(generator): generator for generator in generators}.values())
