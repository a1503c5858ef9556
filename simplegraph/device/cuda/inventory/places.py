"""Take the inventory of captured graphs, and find the owner of the memory at each address.

The owner follows from the allocator's present segments, the memory that is kept alive, and earlier segments.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import operator
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from simplegraph.device.cuda.inventory.nodes import NodeReader, ProcessMemory, Word
from simplegraph.device.protocol import Inventory, MemoryKind, MemorySpan, Touch

PoolId = tuple[int, int]
_DEFAULT: PoolId = (0, 0)
_UNACCOUNTED = {MemoryKind.FOREIGN, MemoryKind.OUTSIDE, MemoryKind.FREED}
_LARGEST_NUMBER = 1 << 20  # the largest number in a struct that may be followed by half of an older address


class Block(NamedTuple):
    """A range of addresses. A tensor that ends at its end begins at `last` or later."""

    start: int
    end: int
    place: MemoryKind
    name: str = ""
    last: int = 0


class Places:
    """The memory of a device, range by range.

    Args:
        segments: the descriptions of the allocator's segments.
        own_pools: ids of the graph's pools.
        workspaces: ids of pools that contain libraries' workspaces.
        named: memory that is kept alive, with names.
        former: ranges that the allocator had before.
        is_device_memory: returns True for an address of device memory.

    Attributes:
        present: the ranges of the allocator's segments.
        is_host_memory: returns True for an address of host memory, which may be in a range of `former`.
    """

    is_host_memory: Callable[[int], bool] = staticmethod(lambda _: False)

    def __init__(
        self,
        segments: Iterable[dict[str, Any]],
        own_pools: Collection[PoolId],
        workspaces: Collection[PoolId] = (),
        named: Sequence[MemorySpan] = (),
        former: Collection[tuple[int, int]] = (),
        is_device_memory: Callable[[int], bool] = lambda _: False,
    ) -> None:
        blocks: list[Block] = []
        self.present: set[tuple[int, int]] = set()
        for segment in segments:
            self.present.add((segment["address"], segment["address"] + segment["total_size"]))
            blocks += _blocks(segment, own_pools, workspaces)
        self._blocks = _ordered(blocks)
        self._named = _ordered(Block(memory.start, memory.end, MemoryKind.KNOWN, memory.name) for memory in named)
        self._former = _ordered(Block(*span, MemoryKind.FREED) for span in set(former) - self.present)
        self._is_device_memory = is_device_memory
        every = [*self._blocks, *self._named, *self._former]
        kinds = (self._named, self._blocks, self._former)
        self._ordered = [([block.start for block in blocks], blocks) for blocks in kinds]
        self._by_address: dict[int, Block | None] = {}  # many kernels have the same addresses
        self.low = min((block.start for block in every), default=0)
        self.high = max((block.end for block in every), default=0)

    def find(self, address: int) -> Block | None:
        """Find the range of an address; None if it is no address of the device."""
        try:
            return self._by_address[address]
        except KeyError:
            block = self._by_address[address] = self._look_up(address)
            return block

    def _look_up(self, address: int) -> Block | None:
        for starts, blocks in self._ordered:
            at = bisect.bisect_right(starts, address) - 1
            if at >= 0 and address < blocks[at].end:
                return None if blocks is self._former and self.is_host_memory(address) else blocks[at]
        return Block(address, address, MemoryKind.OUTSIDE) if self._is_device_memory(address) else None

    def ends_before(self, address: int) -> Block | None:
        """Find the range that ends at an address: kernels may be passed the end of a tensor."""
        return next((b for blocks in (self._named, self._blocks) for b in blocks if b.end == address), None)

    def unaccounted(self, addresses: Iterable[int]) -> list[int]:
        """Return the addresses in memory without a known owner."""
        blocks = ((address, self.find(address)) for address in addresses)
        return [address for address, block in blocks if block is not None and block.place in _UNACCOUNTED]

    def touches(self, words: Iterable[Word]) -> list[Touch]:
        """List the touches of a node, given its words; each address once, without the ends of ranges.

        A word of a struct does not count as an address of freed memory if it may be a small number followed by half of
        an older address.
        """
        once: dict[int, Word] = {}
        for word in words:
            _, _, address, certain, _ = word
            if certain or address not in once:
                once[address] = word
        touches, find = [], self.find
        for index, name, address, certain, parameter in once.values():
            block = find(address)
            if block is not None and (block.place is not MemoryKind.FREED or self._is_freed(address, certain, once)):
                offset = address - block.start
                touches.append(Touch(name, address, offset, block.place, block.name, certain, parameter, index))
        return touches

    def _is_freed(self, address: int, certain: bool, beside: Iterable[int]) -> bool:
        """False for a possible number, and for the end of a range that contains another address of the node."""
        if not certain and address & 0xFFFFFFFF < _LARGEST_NUMBER:
            return False
        end = self.ends_before(address)
        return end is None or not any(self.find(other) == end and other >= end.last for other in beside)


def _ordered(blocks: Iterable[Block]) -> list[Block]:
    return sorted(blocks, key=operator.itemgetter(0, 1))


def _blocks(segment: dict[str, Any], own_pools: Collection[PoolId], workspaces: Collection[PoolId]) -> list[Block]:
    pool, start = tuple(segment["segment_pool_id"]), segment["address"]
    if pool in own_pools or pool in workspaces:  # free blocks belong to the graph or the library, too
        kind, end = MemoryKind.POOL if pool in own_pools else MemoryKind.WORKSPACE, start + segment["total_size"]
        last = segment["blocks"][-1]  # freed blocks are joined, so the start of the last tensor is not known
        return [Block(start, end, kind, last=end - (0 if last["state"] == "inactive" else last["size"]))]
    blocks = []
    for block in segment["blocks"]:
        end = start + block["size"]
        free = block["state"] == "inactive" and pool == _DEFAULT
        blocks.append(Block(start, end, MemoryKind.FREED if free else MemoryKind.FOREIGN))
        start = end
    return blocks


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
    """Read the memory that graphs touch; unreadable parts are in the notes of the inventory.

    Args:
        driver: the CUDA driver; None if there is none.
        graphs: raw handles of the graphs.
        places: makes the `Places`; called only if needed, since it takes milliseconds.
        memory: opens this process's memory.
        every: False leaves out nodes that touch only memory with a known owner.
        plain: with `every=False`, returns True for the name of a kernel that is not read.
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
                inventory.touches = [touch for node_words in words for touch in where.touches(node_words)]
            inventory.nodes, inventory.notes = reader.nodes, reader.notes
    except Exception as error:  # an inventory must not stop a capture
        inventory.notes[f"{type(error).__name__}: {error}"] += 1
    inventory.seconds = time.perf_counter() - started
    return inventory


def device_memory(driver: Any) -> Callable[[int], bool]:
    """Return a function that asks the driver if an address is in device memory."""
    ask = getattr(driver, "cuPointerGetAttribute", None)

    @functools.cache
    def is_device_memory(address: int) -> bool:
        kind = ctypes.c_uint()
        failed = ask is None or ask(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        return not failed and kind.value == _DEVICE

    return is_device_memory
