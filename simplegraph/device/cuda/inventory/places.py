"""Take the inventory of captured graphs, and tell whose memory each address is in.

That follows from what torch's allocator has, what is kept alive, and what was there before.
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
_LARGEST_NUMBER = 1 << 20  # in a struct: half of an older address may be left behind it


class Block(NamedTuple):
    """A range of addresses; a tensor that ends where it ends begins at `last` or after."""

    start: int
    end: int
    place: MemoryKind
    name: str = ""
    last: int = 0


class Places:
    """The memory of a device, range by range.

    Args:
        segments: as torch's allocator describes them.
        own: ids of the graph's pools; workspaces: ids of pools that hold libraries' workspaces.
        named: memory that something keeps alive, with its name.
        former: ranges that the allocator had before.
        is_device_memory: True for an address of the device that the driver knows.

    Attributes:
        present: the allocator's segments.
        is_host_memory: True for an address of the host, which may be where the allocator had memory before.
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
        self._by_address: dict[int, Block | None] = {}  # kernels share addresses
        self.low = min((block.start for block in every), default=0)
        self.high = max((block.end for block in every), default=0)

    def find(self, address: int) -> Block | None:
        """Find the range that an address is in; None if it is no address of the device."""
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
        """Find the range that ends where an address begins, as the end of a tensor does."""
        return next((b for blocks in (self._named, self._blocks) for b in blocks if b.end == address), None)

    def unaccounted(self, addresses: Iterable[int]) -> list[int]:
        """Return the addresses in memory that nothing accounts for."""
        blocks = ((address, self.find(address)) for address in addresses)
        return [address for address, block in blocks if block is not None and block.place in _UNACCOUNTED]

    def touches(self, words: Iterable[Word]) -> list[Touch]:
        """Say what a node touches by its words, each address once, without the ends of ranges.

        A small number in a struct may be followed by half of an older address: such a word is not taken for an address
        of freed memory.
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
        """True unless it is a number, or the end of a range that another of the node's addresses is in."""
        if not certain and address & 0xFFFFFFFF < _LARGEST_NUMBER:
            return False
        end = self.ends_before(address)
        return end is None or not any(self.find(other) == end and other >= end.last for other in beside)


def _ordered(blocks: Iterable[Block]) -> list[Block]:
    return sorted(blocks, key=operator.itemgetter(0, 1))


def _blocks(segment: dict[str, Any], own_pools: Collection[PoolId], workspaces: Collection[PoolId]) -> list[Block]:
    pool, start = tuple(segment["segment_pool_id"]), segment["address"]
    if pool in own_pools or pool in workspaces:  # what is free in there is the graph's, too, or the library's
        kind, end = MemoryKind.POOL if pool in own_pools else MemoryKind.WORKSPACE, start + segment["total_size"]
        last = segment["blocks"][-1]  # what was given back is joined, so nobody can tell what ended there
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
                inventory.touches = [touch for node_words in words for touch in where.touches(node_words)]
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
