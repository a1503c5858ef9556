"""Runs a module's forward once more beside a call, and says what it did; nothing of that stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.context import bypassed
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import has_address, parts, storage_key, wait_collectives
from simplegraph.base.walk import tensors_in
from simplegraph.call.memory import Undo
from simplegraph.device.memory import SavedMemory, copy_limit, default_generator, random_states
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.select import graph_device
from simplegraph.guard.survey import Survey, held_tensors
from simplegraph.manager.proof import cloned, first_difference
from simplegraph.program.observe import MemoryObserver, NumbersSeen
from simplegraph.program.snapshot import Snapshot


@dataclasses.dataclass
class RunEffects:
    """The effects of a run: what it returned and did.

    Attributes:
        leaves, spec: of its outputs.
        outputs: these themselves; None of a rehearsal.
        left: tensors that it set below the module, by name.
        drawn: the states of random generators after it.
        numbers: what its operators were passed, and picked.
        arguments: what it was passed, as a rehearsal left it.
        notes: the places in which a rehearsal noted something, which was put back.
    """

    leaves: list[Any]
    spec: TreeSpec
    outputs: Any
    left: dict[str, list[Tensor]]
    drawn: list[Tensor]
    numbers: NumbersSeen
    arguments: list[Any] = dataclasses.field(default_factory=list)
    notes: set[str] = dataclasses.field(default_factory=set)

    def left_otherwise(self, other: RunEffects) -> set[str]:
        """Name what this run and another set, and to something else."""
        names = self.left.keys() & other.left.keys()
        return {name for name in names if first_difference(self.left[name], other.left[name]) is not None}


def observe_run(
    module: nn.Module,
    run: Callable[[], Any],
    device: torch.device,
    before_write: Callable[[Tensor], object] = id,
) -> RunEffects:
    """Run a module's forward as a call of it.

    Args:
        module: whose forward it is.
        run: the forward, with its arguments.
        device: of the module.
        before_write: is called with each tensor that an operator is about to write to.
    """
    snapshot = Snapshot(module)
    with bypassed(Reason.NESTED), MemoryObserver(before_write=before_write) as observer:
        outputs = wait_collectives(run())
    found = ((name, list(tensors_in(value))) for name, value in snapshot.changes().items())
    left = {name: tensors for name, tensors in found if tensors}
    return RunEffects(*flatten(outputs), outputs, left, random_states(_generators(module, device)), observer.numbers)


def rehearse(module: nn.Module, run: Callable[[], Any], passed: Sequence[Any], device: torch.device) -> RunEffects:
    """Run a module's forward, and put back what that changed: memory, random numbers, Python's objects.

    Args:
        module: whose forward it is.
        run: the forward, with its arguments.
        passed: the leaves of the arguments, which the forward may write to.
        device: of the module.
    """
    held: dict[int, tuple[str, Tensor]] = {}
    given = [("an argument", tensor) for tensor in tensors_in(passed)]
    for name, tensor in [*((entry.name, entry.tensor) for entry in held_tensors(module)), *given]:
        for part in parts(tensor):
            if has_address(part) and not isinstance(part, nn.Parameter):
                held.setdefault(storage_key(part), (name, part))
    saved = SavedMemory((), held.values())
    limit = copy_limit(graph_device(device).free_memory())
    generators = tuple(dict.fromkeys((*_generators(module, device), torch.default_generator)))
    with CAPTURE_LOCK, Undo(saved if saved.nbytes <= limit else None, generators) as undo:
        snapshot = undo.watch(module)
        effects = observe_run(module, run, device, undo.copy)
        return dataclasses.replace(
            effects,
            leaves=cloned(effects.leaves),
            outputs=None,
            left={name: cloned(tensors) for name, tensors in effects.left.items()},
            arguments=cloned(passed),
            notes={note.name for note in snapshot.take_notes()},
        )


def _generators(module: nn.Module, device: torch.device) -> list[torch.Generator]:
    return [default_generator(device), *Survey(module).generators.values()]
