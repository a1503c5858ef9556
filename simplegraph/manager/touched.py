"""Inspect the memory that captured graphs touch: refuse graphs that touch freed memory, and keep foreign tensors alive.

Kernels that torch launches, or libraries for torch, are only reported: torch's dispatcher has shown their tensors, and
arguments that they do not use may contain old addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from simplegraph.base.errors import CaptureError, StaleGraphError
from simplegraph.base.failures import Remedy, remedy_in_reach
from simplegraph.base.reasons import explain_command
from simplegraph.base.walk import all_tensors
from simplegraph.device.inventory import take_inventory
from simplegraph.device.kernel_names import launched_by_torch, readable
from simplegraph.device.protocol import CAPTURE_LOCK, Inventory, MemoryKind, MemorySpan, Touch
from simplegraph.manager.capture import GraphCapture
from simplegraph.manager.stats import CaptureSummary
from simplegraph.manager.table import OTHERS_TOO, CaptureJob, Key, ProgramTable, on_all_ranks
from simplegraph.program.probes import Probe

logger = logging.getLogger("simplegraph")


class Inspection(Probe):
    """Reads the addresses that captured graphs touch, and drops graphs that touch freed memory."""

    def inspect(self, capture: GraphCapture, summary: CaptureSummary) -> CaptureSummary:
        """Inspect the largest and the smallest graph, and the others if one of these touches freed memory."""
        table, jobs, started = capture.table, capture.jobs, time.perf_counter()
        read = list(next((run.owned() for run in reversed(capture.runs) if run.recorded), ()))
        with table.ranks.together(), table.releasing_unused_pool(), CAPTURE_LOCK:
            refused = _inspect(table, jobs, read)
            if refused is None:
                return summary  # the same on all ranks
            dropped = on_all_ranks(table, "inspecting", jobs, refused)
            failed = {job: dropped[job.label] for job in jobs if job.label in dropped}
            table.forget(failed)
        table.add_failures(failed, OTHERS_TOO)
        parts = {**summary.parts, "inventory": time.perf_counter() - started}
        captured = summary.captured - len(failed)
        return dataclasses.replace(summary, captured=captured, failed={**summary.failed, **dropped}, parts=parts)


def _inspect(table: ProgramTable, jobs: Sequence[CaptureJob], read: Sequence[Tensor]) -> dict[str, CaptureError] | None:
    """Read the addresses that the largest and the smallest graph touch.

    Args:
        table: the table of the graphs; graphs that touch freed memory are removed from it.
        jobs: the captured jobs, largest first.
        read: tensors that observed runs read, which are kept alive.

    Returns:
        The errors of removed graphs, by label; None if there is no graph, or no driver to ask.
    """
    captured = [job for job in jobs if job.key in table.graphs]
    ends = {job.key: job for job in (*captured[:1], *captured[-1:])}
    spans = [span for tensor in (*read, *table.foreign) for span in _memory(tensor)]
    inventories: dict[str, Inventory] = {}
    for job in captured:
        table.graphs[job.key].describe_freed = functools.partial(_freed_since, weakref.ref(table), job.key)
    for job in ends.values():
        graph = table.graphs[job.key]
        kept = [*spans, *(span for tensor in graph.program.constants for span in _memory(tensor))]
        graph.counters.inventory = inventory = take_inventory(table.device, table.pool, graph.program.segments, kept)
        if inventory is None:
            return None
        inventories[job.label] = inventory
    if not ends:
        return None
    table.accounted = spans
    refused: dict[str, CaptureError] = {}
    for job in ends.values():
        if freed := _freed(inventories[job.label]):
            refused[job.label] = _refusal(job, freed[0])
            table.forget([job])
        else:
            _keep(table, inventories[job.label])
    between = [job for job in captured if job.key not in ends]
    if refused and between:  # these may do the same
        return refused | (_inspect(table, between, read) or {})
    for job in between:
        table.graphs[job.key].program.check_first = functools.partial(_check_first, weakref.ref(table), job.key)
    return refused


def _check_first(table_ref: weakref.ref[ProgramTable], key: Key) -> None:
    """Read the addresses that a graph touches before its first replay, unless a proof did.

    Raises:
        StaleGraphError: the graph touches freed memory.
    """
    table = table_ref()
    graph = None if table is None else table.graphs.get(key)
    if graph is None or graph.counters.inventory is not None:
        return
    if (freed := _freed_since(table_ref, key)) is not None:
        graph.counters.inventory = None  # so that the next replay is refused, too
        raise StaleGraphError(
            f"{graph.counters.label} cannot be replayed: {freed}, and a replay would read whatever was allocated there "
            "since. Keep the tensor that it reads as an attribute of the module, and capture again (reset_graphs())."
        )


def _freed_since(table_ref: weakref.ref[ProgramTable], key: Key) -> str | None:
    """Describe a kernel that uses memory freed since a graph's capture; see `CapturedGraph.describe_freed`."""
    table = table_ref()
    graph = None if table is None else table.graphs.get(key)
    if table is None or graph is None or (graph.counters.proof and graph.counters.inventory is not None):
        return None
    inventory = take_inventory(table.device, table.pool, graph.program.segments, ())
    if inventory is None:
        return None
    freed = _freed(inventory)
    if not freed and graph.counters.inventory is None:
        _keep(table, inventory)
    graph.counters.inventory = graph.counters.inventory or inventory
    return _describe_freed(freed[0]) if freed else None


def _memory(tensor: Tensor) -> Iterator[MemorySpan]:
    # A fake tensor has a GPU as its device but no memory, and torch warns if its address is read.
    if tensor.layout is torch.strided and (storage := tensor.untyped_storage()).device.type == "cuda":
        start = storage.data_ptr()
        if not start:
            return
        shape = "nested" if tensor.is_nested else list(tensor.shape)
        yield MemorySpan(start, start + storage.nbytes(), f"{str(tensor.dtype).removeprefix('torch.')}{shape}")


def _unseen(inventory: Inventory, place: MemoryKind) -> list[Touch]:
    """List the touches in one kind of memory by kernels that torch's dispatcher does not show."""
    return [touch for touch in inventory.touches if touch.place is place and not launched_by_torch(touch.node)]


def _freed(inventory: Inventory) -> list[Touch]:
    """List the touches of freed memory that are certain: not a word of a struct that may be padding."""
    return [touch for touch in _unseen(inventory, MemoryKind.FREED) if touch.certain]


_KEEP = Remedy("Keep the tensor that it reads as an attribute of the module.", breaks=True)


def _refusal(job: CaptureJob, touch: Touch) -> CaptureError:
    cause = _describe_freed(touch)
    return CaptureError(
        f"capturing {job.label} failed\n  {cause}, and a replay would read whatever was allocated there since.\n"
        f"  {remedy_in_reach(_KEEP, trains=job.trains)}",
        cause=cause,
    )


def _describe_freed(touch: Touch) -> str:
    return f"the kernel {readable(touch.node)} touches memory at {touch.address:#x} that was given back"


def _keep(table: ProgramTable, inventory: Inventory) -> None:
    """Keep tensors alive that a graph touches and that have no known owner; warn once of memory in no tensor."""
    spans = [*table.accounted, *(span for tensor in table.foreign for span in _memory(tensor))]
    foreign = [
        touch
        for touch in _unseen(inventory, MemoryKind.FOREIGN)
        if touch.certain and touch.address not in table.unowned and not _holds(spans, touch)
    ]
    if not foreign:
        return
    tensors = _tensors_at({touch.address for touch in foreign})
    table.foreign += tensors
    spans = [span for tensor in tensors for span in _memory(tensor)]
    # Copies and fills may touch a library's workspace of another thread, such as autograd's.
    without_tensor = [touch for touch in foreign if touch.parameter >= 0 and not _holds(spans, touch)]
    if without_tensor and not table.unowned:
        logger.warning(
            "simplegraph: %s: graphs touch device memory that belongs to no tensor, such as the kernel %s at %#x.\n"
            "  Replays are correct as long as the owner of this memory keeps it there.\n  See: %s",
            *(
                table.stats.name,
                readable(without_tensor[0].node),
                without_tensor[0].address,
                explain_command("foreign-memory"),
            ),
        )
    table.unowned |= {touch.address for touch in without_tensor}


def _holds(spans: Sequence[MemorySpan], touch: Touch) -> bool:
    return any(start <= touch.address < end for start, end, _ in spans)


def _tensors_at(addresses: Iterable[int]) -> list[Tensor]:
    """Find tensors whose memory contains these addresses, among all objects of the process."""
    addresses_to_find, tensors = set(addresses), []
    for tensor in all_tensors():
        if addresses_to_find:
            with contextlib.suppress(Exception):  # of a subclass without memory, or half made
                for start, end, _ in _memory(tensor):
                    inside = {address for address in addresses_to_find if start <= address < end}
                    tensors += [tensor.detach()] if inside else []
                    addresses_to_find -= inside
    return tensors
