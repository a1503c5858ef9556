"""Take the inventory of captured graphs."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from simplegraph.device.cuda.inventory.nodes import NodeReader, ProcessMemory
from simplegraph.device.cuda.inventory.places import Places
from simplegraph.device.inventory import Inventory

_MEMORY_TYPE, _DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_GRAPH = ("GetNodes", "NodeGetType", "KernelNodeGetParams_v2", "MemcpyNodeGetParams", "MemsetNodeGetParams")
_FUNCTIONS = (*(f"cuGraph{name}" for name in (*_GRAPH, "ChildGraphNodeGetGraph")), "cuFuncGetParamInfo")


def read_inventory(
    driver: Any,
    graphs: Sequence[int],
    places: Callable[[], Places],
    memory: Callable[[], Any] = ProcessMemory,
    *,
    every: bool = True,
    plain: Callable[[str], bool] | None = None,
) -> Inventory:
    """Read what graphs touch; what cannot be read is in its notes.

    Args:
        driver: the CUDA driver; None where there is none.
        graphs: raw handles.
        places: returns what tells whose memory an address is in; asked only if need be, since that takes milliseconds.
        memory: opens this process's memory.
        every: False leaves out nodes that touch only memory that is accounted for.
        plain: tells the name of a kernel that is not read then.
    """
    started, inventory = time.perf_counter(), Inventory()
    missing = [name for name in _FUNCTIONS if not hasattr(driver, name)]
    if missing:
        inventory.notes[f"the driver has no {missing[0]}"] += 1
        return inventory
    try:
        with memory() as read:
            reader = NodeReader(driver, read, None if every else plain)
            if reader.walk(graphs):
                where = places()
                where.is_host_memory = read.holds
                words = reader.words(where.low, where.high, list if every else where.unaccounted)
                inventory.touches = [touch for each in words for touch in where.touches(each)]
            inventory.nodes, inventory.notes = reader.nodes, reader.notes
    except Exception as error:  # whatever it is, a report is not worth a capture
        inventory.notes[f"{type(error).__name__}: {error}"] += 1
    inventory.seconds = time.perf_counter() - started
    return inventory


def device_memory(driver: Any) -> Callable[[int], bool]:
    """Return a function that asks the driver if an address is one of a device's."""
    ask = getattr(driver, "cuPointerGetAttribute", None)

    @functools.cache
    def is_device_memory(address: int) -> bool:
        kind = ctypes.c_uint()
        failed = ask is None or ask(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        return not failed and kind.value == _DEVICE

    return is_device_memory
