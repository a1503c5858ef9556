"""Runs a module's forward once more beside a call, describes its effects, and undoes them.

Replays are compared by `simplegraph.manager.replay_proof.ReplayProof`; these runs have no graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.context import bypassed
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import has_address, parts, storage_key, wait_collectives
from simplegraph.base.walk import tensors_in
from simplegraph.call.rehearsals import Undo
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.saved_state import SavedMemory, copy_limit, default_generator, put_random_states, random_states
from simplegraph.device.select import graph_device
from simplegraph.guard.survey import Survey, held_tensors
from simplegraph.manager.replay_proof import cloned, first_difference
from simplegraph.program.observe import MemoryObserver, NumbersSeen
from simplegraph.program.snapshot import Snapshot


@dataclasses.dataclass
class RunEffects:
    """The effects of a run, and its outputs.

    Attributes:
        leaves, spec: leaves and structure of its outputs.
        outputs: the outputs themselves; None for a rehearsal.
        left_tensors: tensors that it left in places below the module, by name.
        drawn: the states of random generators after it.
        numbers: the numbers that its operators were passed, and that it read back.
        written: storage keys of memory from before it that its operators wrote to.
        arguments: the arguments as a rehearsal left them.
        done_flags: the places of done flags that a rehearsal set, which were restored.
    """

    leaves: list[Any]
    spec: TreeSpec
    outputs: Any
    left_tensors: dict[str, list[Tensor]]
    drawn: list[Tensor]
    numbers: NumbersSeen
    written: set[int]
    arguments: list[Any] = dataclasses.field(default_factory=list)
    done_flags: set[str] = dataclasses.field(default_factory=set)

    def differing_tensors(self, other: RunEffects) -> set[str]:
        """Name the places in which this run and another left different tensors."""
        names = self.left_tensors.keys() & other.left_tensors.keys()
        return {
            name for name in names if first_difference(self.left_tensors[name], other.left_tensors[name]) is not None
        }


def observe_run(
    module: nn.Module,
    run: Callable[[], Any],
    device: torch.device,
    before_write: Callable[[Tensor], object] = lambda _: None,
) -> RunEffects:
    """Run a module's forward as a call of it, and observe it.

    Args:
        module: the module.
        run: the forward, with its arguments.
        device: the device of the module.
        before_write: called with each tensor that an operator is about to write to.
    """
    snapshot = Snapshot(module)
    with bypassed(Reason.NESTED), MemoryObserver(before_write=before_write) as observer:
        outputs = wait_collectives(run())
    changed = ((name, list(tensors_in(value))) for name, value in snapshot.changes().items())
    left_tensors = {name: tensors for name, tensors in changed if tensors}
    drawn = random_states(_generators(module, device))
    return RunEffects(*flatten(outputs), outputs, left_tensors, drawn, observer.numbers, observer.written)


def rehearse(module: nn.Module, run: Callable[[], Any], passed: Sequence[Any], device: torch.device) -> RunEffects:
    """Run a module's forward, and undo its changes of memory, random generators and Python objects.

    Args:
        module: the module.
        run: the forward, with its arguments.
        passed: the leaves of the arguments, which the forward may write to.
        device: the device of the module.
    """
    memory = _held_memory(module, passed, device)
    with CAPTURE_LOCK, Undo(memory, _all_generators(module, device)) as undo:
        snapshot = undo.watch(module)
        effects = observe_run(module, run, device, undo.copy)
        return dataclasses.replace(
            effects,
            leaves=cloned(effects.leaves),
            outputs=None,
            left_tensors={name: cloned(tensors) for name, tensors in effects.left_tensors.items()},
            arguments=cloned(passed),
            done_flags={flag.name for flag in snapshot.take_done_flags()},
        )


class Start:
    """Starts a second run of a module's forward from the same state as the first, and undoes its changes.

    Args:
        module: the module, before the first run.
        device: the device of the module.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._generators = module, _all_generators(module, device)
        self._memory = _held_memory(module, (), device) or SavedMemory(())
        self._copies, self._random = self._memory.copy(), random_states(self._generators)
        self._snapshot = Snapshot(module)

    @contextlib.contextmanager
    def again(self) -> Iterator[Callable[[], str | None]]:
        """Restore the start; yields a function that says how the module's memory differs from after the first run."""
        with Undo(self._memory, self._generators) as undo:
            undo.watch(self._module)
            names, tensors = [name for name, _ in self._memory.tensors], [it for _, it in self._memory.tensors]
            expected = cloned(tensors)
            self._memory.put(self._copies)
            put_random_states(self._generators, self._random)
            self._snapshot.put_back()
            yield lambda: first_difference(tensors, expected, names=names)


def _held_memory(module: nn.Module, passed: Sequence[Any], device: torch.device) -> SavedMemory | None:
    """Prepare to copy a module's tensors, except parameters, and its arguments; None if they are too large."""
    by_storage: dict[int, tuple[str, Tensor]] = {}
    given = [("an argument", tensor) for tensor in tensors_in(passed)]
    for name, tensor in [*((entry.name, entry.tensor) for entry in held_tensors(module)), *given]:
        for part in parts(tensor):
            if has_address(part) and not isinstance(part, nn.Parameter):
                by_storage.setdefault(storage_key(part), (name, part))
    memory = SavedMemory(list(by_storage.values()))
    return memory if memory.nbytes <= copy_limit(graph_device(device).free_memory()) else None


def _all_generators(module: nn.Module, device: torch.device) -> tuple[torch.Generator, ...]:
    return tuple(dict.fromkeys((*_generators(module, device), torch.default_generator)))


def _generators(module: nn.Module, device: torch.device) -> list[torch.Generator]:
    return [default_generator(device), *Survey(module).generators.values()]
