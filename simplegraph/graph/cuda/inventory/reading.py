"""Take the inventory of captured graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

from simplegraph.graph.cuda.inventory.nodes import NodeReader, ProcessMemory, Word
from simplegraph.graph.cuda.inventory.places import Places
from simplegraph.graph.inventory import Inventory

_MEMORY_TYPE, _DEVICE = 2, 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_DEVICE
_GRAPH = ("GetNodes", "NodeGetType", "KernelNodeGetParams_v2", "MemcpyNodeGetParams", "MemsetNodeGetParams")
_FUNCTIONS = (*(f"cuGraph{name}" for name in (*_GRAPH, "ChildGraphNodeGetGraph")), "cuFuncGetParamInfo")
_MOST_NODES = 20_000


def read_inventory(
    driver: Any, graphs: Sequence[int], places: Places, memory: Callable[[], Any] = ProcessMemory
) -> Inventory:
    """Read what graphs touch; what cannot be read is in its notes.

    Args:
        driver: the CUDA driver; None where there is none.
        graphs: raw handles.
        places: tells whose memory an address is in.
        memory: opens this process's memory.
    """
    started, inventory = time.perf_counter(), Inventory()
    missing = [name for name in _FUNCTIONS if not hasattr(driver, name)]
    if missing:
        inventory.notes[f"the driver has no {missing[0]}"] += 1
        return inventory
    try:
        with contextlib.ExitStack() as stack:
            reader = NodeReader(driver, stack.enter_context(memory()), places.low, places.high)
            for graph in graphs:
                words = itertools.takewhile(lambda word: word.node < _MOST_NODES, reader.words(graph))
                for _, found in itertools.groupby(words, operator.attrgetter("node")):
                    _add(inventory, places, list(found))
            inventory.nodes, inventory.notes = reader.nodes, reader.notes
            if reader.nodes > _MOST_NODES:
                inventory.notes[f"nodes behind the first {_MOST_NODES}"] += 1
    except Exception as error:  # whatever it is, a report is not worth a capture
        inventory.notes[f"{type(error).__name__}: {error}"] += 1
    inventory.seconds = time.perf_counter() - started
    return inventory


def _add(inventory: Inventory, places: Places, words: Sequence[Word]) -> None:
    """Note what one node touches, each address once."""
    beside = [places.find(word.value) for word in words]
    certain: dict[tuple[str, int], bool] = {}
    for word in words:
        certain[word.name, word.value] = certain.get((word.name, word.value), False) or word.certain
    for (name, address), sure in certain.items():
        touch = places.touch(name, address, certain=sure, beside=beside)
        if touch is not None:
            inventory.touches.append(touch)


def device_memory(driver: Any) -> Callable[[int], bool]:
    """Return a function that asks the driver if an address is one of a device's."""
    ask = getattr(driver, "cuPointerGetAttribute", None)

    @functools.cache
    def is_device_memory(address: int) -> bool:
        kind = ctypes.c_uint()
        failed = ask is None or ask(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        return not failed and kind.value == _DEVICE

    return is_device_memory
