"""Show the memory that the kernels of captured graphs touch, by module, according to the CUDA driver."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

from torch import nn

from simplegraph.base.tensors import has_address, parts
from simplegraph.device.inventory import take_inventory
from simplegraph.device.kernel_names import readable
from simplegraph.device.protocol import Inventory, MemoryKind, MemorySpan, Touch
from simplegraph.guard.survey import held_tensors
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.table import ProgramTable


def touched_lines(module: nn.Module, manager: CudaGraphManager | None) -> tuple[str, ...]:
    """Describe the memory that a module's graphs touch; the driver is asked again about graphs read before."""
    lines: list[str] = []
    if manager is not None:
        names = _named_memory(module)
        _read_touches(manager.table)
        for graph in manager.report().graphs():
            if (inventory := graph.inventory) is not None:
                source = f"as {inventory.nodes} nodes tell (read in {inventory.seconds * 1e3:.1f} ms):"
                lines += [f"  {graph.mode} {graph.size} touches, {source}"]
                lines += [f"    {line}" for line in report_lines(inventory, names)]
    return tuple(lines) or ("  what graphs touch is not known: only a GPU's driver can be asked",)


def _named_memory(module: nn.Module) -> tuple[MemorySpan, ...]:
    """List the memory of every tensor that a module holds, with names."""
    named = []
    for entry in held_tensors(module):
        for storage in (part.untyped_storage() for part in parts(entry.tensor) if has_address(part)):
            named.append(MemorySpan(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), entry.name))
    return tuple(named)


def _read_touches(table: ProgramTable) -> None:
    """Read, for a report, all touches of the graphs that were read before."""
    for graph in table.graphs.values():
        before = graph.counters.inventory
        if before is not None:
            every = take_inventory(table.device, table.pool, graph.program.segments, table.accounted, every=True)
            graph.counters.inventory = every or before


def report_lines(inventory: Inventory, names: Sequence[MemorySpan] = ()) -> Iterator[str]:
    """Yield a line for each kernel with the memory that it touches, under its module's name, and lines of notes.

    A kernel belongs to the module whose memory it touches.

    Args:
        inventory: of a graph.
        names: of memory; preferred to those that the driver's reader had.
    """
    modules: dict[str, dict[str, dict[str, None]]] = {}
    for _, touches in itertools.groupby(inventory.touches, operator.attrgetter("number")):
        named = [(touch, _name(touch, names)) for touch in touches]
        owners = [name.rpartition(".")[0] for touch, name in named if name and touch.certain]
        kernels = modules.setdefault(max(owners, key=len, default=""), {})
        for touch, name in named:
            kernels.setdefault(readable(touch.node), {}).setdefault(_shown(touch, name))
    for module, kernels in modules.items():
        if module:
            yield f"{module}:"
        for kernel, shown in kernels.items():
            yield f"{'  ' * bool(module)}{kernel}: {', '.join(shown)}"
    for note, count in inventory.notes.items():
        yield f"not read: {count} x {note}"


def _name(touch: Touch, names: Sequence[MemorySpan]) -> str:
    if touch.place is MemoryKind.POOL:
        return ""
    return next((memory.name for memory in names if memory.start <= touch.address < memory.end), touch.name)


def _shown(touch: Touch, name: str) -> str:
    if touch.place is MemoryKind.POOL:
        return "pool"
    shown = name or f"{touch.place.value} at {touch.address:#x}"
    return shown if touch.certain else f"{shown}?"
