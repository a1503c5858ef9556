"""Look at what captured graphs touch: refuse those that read freed memory, and keep alive what nobody else does."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from simplegraph.errors import CaptureError
from simplegraph.graph.device import GraphDevice, GraphPool
from simplegraph.graph.failures import BREAK
from simplegraph.graph.inventory import Inventory, KnownMemory, MemoryKind, Touch
from simplegraph.manager.jobs import CaptureJob
from simplegraph.manager.stats import GraphStats
from simplegraph.reasons import DOCUMENTATION

logger = logging.getLogger("simplegraph")


class TouchingGraphs(Protocol):
    """The table of the graphs that are inspected; see `simplegraph.manager.table.ProgramTable`."""

    device: GraphDevice
    pool: GraphPool
    stats: GraphStats
    graphs: dict[Any, Any]
    foreign: list[Tensor]
    unowned: set[int]

    def forget(self, jobs: Iterable[CaptureJob]) -> None:
        """Drop these jobs' graphs."""


def inspect(table: TouchingGraphs, jobs: Sequence[CaptureJob], read: Sequence[Tensor]) -> dict[str, CaptureError]:
    """Read what the largest and the smallest graph touch; both at once tell a struct's addresses from its padding.

    Args:
        table: of the graphs; a graph that touches memory which was given back is taken out of it.
        jobs: what was captured, largest first.
        read: tensors that the forward was seen to read, which are kept alive.

    Returns:
        Why graphs were taken out, by label.
    """
    captured = [job for job in jobs if job.key in table.graphs]
    ends = {job.key: job for job in (*captured[:1], *captured[-1:])}
    known = [each for tensor in (*read, *table.foreign) for each in _memory(tensor)]
    found: dict[str, Inventory] = {}
    for job in ends.values():
        program = table.graphs[job.key].program
        kept = [*known, *(each for tensor in program.constants for each in _memory(tensor))]
        inventory = table.device.inventory(table.pool, program.segments, kept)
        if inventory is None:
            return {}
        found[job.label] = table.graphs[job.key].counters.inventory = inventory
    sure = _in_all(list(found.values()))
    refused: dict[str, CaptureError] = {}
    foreign: list[Touch] = []
    for job in ends.values():
        touches = found[job.label].touches
        freed = [touch for touch in touches if touch.place is MemoryKind.FREED and _is_sure(touch, sure)]
        if freed:
            refused[job.label] = _freed(job, freed[0])
            table.forget([job])
        else:
            foreign += found[job.label].certain(MemoryKind.FOREIGN)
    _keep(table, [touch for touch in foreign if touch.address not in table.unowned])
    if refused and len(captured) > len(ends):  # the sizes in between may do the same
        refused |= inspect(table, [job for job in captured if job.key not in ends], read)
    return refused


def freed_since(table: TouchingGraphs, graph: Any) -> str | None:
    """Say which kernel touches memory that was given back since a graph's capture; None if none is known to.

    Only before its first proof: a graph that was replayed keeps what it keeps.
    """
    if graph.counters.proof:
        return None
    found = table.device.inventory(table.pool, graph.program.segments, ())
    freed = [] if found is None else found.certain(MemoryKind.FREED)
    return _said_of_freed(freed[0]) if freed else None


def _memory(tensor: Tensor) -> Iterator[KnownMemory]:
    if tensor.layout is torch.strided and tensor.device.type == "cuda":
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if not start:
            return
        yield KnownMemory(
            start, start + storage.nbytes(), f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        )


def _in_all(inventories: Sequence[Inventory]) -> set[tuple[str, int]]:
    """Return what kernels of several graphs touch alike: padding would differ; of one graph, nothing."""
    if len(inventories) < 2:
        return set()
    each = [{(touch.node, touch.address) for touch in inventory.touches} for inventory in inventories]
    return set.intersection(*each)


def _is_sure(touch: Touch, sure: set[tuple[str, int]]) -> bool:
    return touch.certain or (touch.node, touch.address) in sure


def _freed(job: CaptureJob, touch: Touch) -> CaptureError:
    cause = _said_of_freed(touch)
    return CaptureError(
        f"capturing {job.label} failed\n  {cause}: a replay would find there whatever comes next.\n"
        f"  Keep the tensor that it reads as an attribute of the module, or {BREAK}.",
        cause=cause,
    )


def _said_of_freed(touch: Touch) -> str:
    return f"the kernel {touch.node} touches memory at {touch.address:#x} that was given back"


def _keep(table: TouchingGraphs, foreign: Sequence[Touch]) -> None:
    """Keep the tensors alive that graphs touch and nobody accounts for; warn once of memory that has none."""
    if not foreign:
        return
    addresses = {touch.address for touch in foreign}
    found = _tensors_at(addresses)
    table.foreign += found
    spans = [span for tensor in found for span in _memory(tensor)]
    left = [touch for touch in foreign if not any(start <= touch.address < end for start, end, _ in spans)]
    if left and not table.unowned:
        logger.warning(
            "simplegraph: %s: graphs touch device memory that belongs to no tensor, such as the kernel %s at %#x.\n"
            "  Replays are right while whoever owns it leaves it there.\n  See %slimits.html",
            *(table.stats.name, left[0].node, left[0].address, DOCUMENTATION),
        )
    table.unowned |= {touch.address for touch in left}


def _tensors_at(addresses: Iterable[int]) -> list[Tensor]:
    """Find tensors in whose memory these addresses are; this looks at every object there is."""
    left, found = set(addresses), []
    for held in gc.get_objects():
        if left and issubclass(type(held), Tensor):
            with contextlib.suppress(Exception):  # of a subclass without memory, or half made
                for start, end, _ in _memory(held):
                    inside = {address for address in left if start <= address < end}
                    found += [held.detach()] if inside else []
                    left -= inside
    return found
