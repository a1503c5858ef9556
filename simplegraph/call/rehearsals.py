"""Undo the changes of runs that are not the call's own: rehearsals before a capture, proofs, checks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.modes import outside_modes
from simplegraph.base.tensors import storage_key
from simplegraph.call.call import Call
from simplegraph.call.external_memory import MemoryInUse, drawn_generators
from simplegraph.device.saved_state import HostRandom, SavedMemory, copy_limit, put_random_states, random_states
from simplegraph.guard.plain_state import PlainState
from simplegraph.manager.table import ProgramTable
from simplegraph.program.index_checks import IndexChecks
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.probes import Probe, Run
from simplegraph.program.snapshot import Snapshot


class Undo(contextlib.ExitStack):
    """Copies memory and the states of random generators, and restores them when it is closed.

    Args:
        saved: the memory to copy; None for none.
        generators: random generators beside Python's and NumPy's.
        kept: memory that the caller restores, so that it is not copied.
        budget: the most bytes that `copy` may copy.
    """

    def __init__(
        self,
        saved: SavedMemory | None,
        generators: Sequence[torch.Generator],
        *,
        kept: SavedMemory | None = None,
        budget: float = float("inf"),
    ) -> None:
        super().__init__()
        self._keys, self._budget = (
            {key for memory in (saved, kept) if memory is not None for key in memory.keys},
            budget,
        )
        if saved is not None:
            self.callback(saved.put, saved.copy())
        self.callback(put_random_states, generators, random_states(generators))
        self.callback(HostRandom().put_back)

    def watch(self, module: Any, *, code: bool = False, plain: PlainState | None = None) -> Snapshot:
        """Also restore the Python state below a module; `code` is as for `Snapshot`.

        During `plain.capture_or_proof`, what another thread sets meanwhile stays.
        """
        snapshot = Snapshot(module, code=code)

        def put_back() -> None:
            with contextlib.nullcontext() if plain is None else plain.keeping_others(module):
                snapshot.take_done_flags()
                snapshot.put_back(snapshot.changes())

        self.callback(put_back)
        return snapshot

    def copy(self, tensor: Tensor) -> None:
        """Copy a tensor's whole storage, unless it was copied before or exceeds the budget."""
        if storage_key(tensor) not in self._keys and tensor.untyped_storage().nbytes() <= self._budget:
            with outside_modes():
                memory = SavedMemory([("", tensor)])
                self.callback(memory.put, memory.copy())
            self._keys |= memory.keys
            self._budget -= memory.nbytes


@dataclasses.dataclass(eq=False)
class Rehearsals(Probe):
    """Undoes the writes and random draws of rehearsed runs of a call's forward.

    The module's memory is copied before such a run, unless it is too large, since writes by kernels that torch does not
    dispatch are not observed. Other memory is copied before an operator writes to it, if other runs wrote to it, too,
    and if the copy fits the budget. Memory that only this run writes stays: it may be a cache that Python code takes
    for filled from now on.

    Args:
        seen: the memory that observed runs of the forward used.
        table: the table of the call's graphs.
        call: the call whose forward runs.
        observers: observers of the runs since then.
    """

    seen: MemoryInUse
    table: ProgramTable
    call: Call
    observers: Sequence[MemoryObserver]

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Undo the changes of a rehearsed run at its end."""
        if not run.rehearsed:
            yield
            return
        seen, device = self.seen, self.table.device
        saved, budget = seen.save(self.table, self.call), copy_limit(device.free_memory())
        with Undo(saved, drawn_generators(self.call, device.torch_device), budget=budget) as undo:

            def copy(tensor: Tensor) -> None:
                if (key := storage_key(tensor)) in seen.written or any(
                    key in observer.written or observer.made(tensor) for observer in self.observers
                ):
                    undo.copy(tensor)

            run.before_write = copy
            with IndexChecks():
                yield
