"""Tell whose memory an address is in: by what torch's allocator has, what is kept alive, and what was there before."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from simplegraph.graph.inventory import KnownMemory, MemoryKind, Touch

PoolId = tuple[int, int]
_DEFAULT: PoolId = (0, 0)


class Block(NamedTuple):
    """A range of addresses."""

    start: int
    end: int
    place: MemoryKind
    name: str = ""


class Places:
    """The memory of a device, range by range.

    Args:
        segments: as torch's allocator describes them.
        own: ids of the graph's pools; workspaces: ids of pools that hold libraries' workspaces.
        known: memory that is kept alive, by whoever it is.
        former: ranges that the allocator had before.
        is_device_memory: True for an address of the device that the driver knows.
    """

    def __init__(
        self,
        segments: Iterable[dict[str, Any]],
        own: Collection[PoolId],
        workspaces: Collection[PoolId] = (),
        known: Sequence[KnownMemory] = (),
        former: Collection[tuple[int, int]] = (),
        is_device_memory: Callable[[int], bool] = lambda _: False,
    ) -> None:
        blocks: list[Block] = []
        self.present: set[tuple[int, int]] = set()
        for segment in segments:
            self.present.add((segment["address"], segment["address"] + segment["total_size"]))
            blocks += _blocks(segment, own, workspaces)
        self._blocks = _ordered(blocks)
        self._known = _ordered(Block(each.start, each.end, MemoryKind.KNOWN, each.name) for each in known)
        self._former = _ordered(Block(*each, MemoryKind.FREED) for each in set(former) - self.present)
        self._is_device_memory = is_device_memory
        every = [*self._blocks, *self._known, *self._former]
        kinds = (self._known, self._blocks, self._former)
        self._ordered = [([block.start for block in blocks], blocks) for blocks in kinds]
        self._found: dict[int, Block | None] = {}  # kernels share addresses
        self.low = min((block.start for block in every), default=0)
        self.high = max((block.end for block in every), default=0)

    def find(self, address: int) -> Block | None:
        """Find the range that an address is in; None if it is no address of the device."""
        if address not in self._found:
            self._found[address] = self._look_up(address)
        return self._found[address]

    def _look_up(self, address: int) -> Block | None:
        for starts, blocks in self._ordered:
            at = bisect.bisect_right(starts, address) - 1
            if at >= 0 and address < blocks[at].end:
                return blocks[at]
        return Block(address, address, MemoryKind.OUTSIDE) if self._is_device_memory(address) else None

    def ends_before(self, address: int) -> Block | None:
        """Find the range that ends where an address begins, as the end of a tensor does."""
        return next((b for blocks in (self._known, self._blocks) for b in blocks if b.end == address), None)

    def touch(self, node: str, address: int, *, certain: bool, beside: Sequence[Block | None]) -> Touch | None:
        """Say what a node touches by an address; None if that is no address, or only the end of a range.

        Args:
            node: its name.
            address: the word.
            certain: False if it may be padding.
            beside: the ranges that the node's other addresses are in.
        """
        block = self.find(address)
        if block is None:
            return None
        if block.place is MemoryKind.FREED and self.ends_before(address) in beside:
            return None
        return Touch(node, address, address - block.start, block.place, block.name, certain)


def _ordered(blocks: Iterable[Block]) -> list[Block]:
    return sorted(blocks, key=operator.itemgetter(0, 1))


def _blocks(segment: dict[str, Any], own: Collection[PoolId], workspaces: Collection[PoolId]) -> list[Block]:
    pool, start = tuple(segment["segment_pool_id"]), segment["address"]
    if pool in own or pool in workspaces:  # what is free in there is the graph's, too, or the library's
        return [Block(start, start + segment["total_size"], MemoryKind.POOL if pool in own else MemoryKind.WORKSPACE)]
    found = []
    for block in segment["blocks"]:
        end = start + block["size"]
        free = block["state"] == "inactive" and pool == _DEFAULT
        found.append(Block(start, end, MemoryKind.FREED if free else MemoryKind.FOREIGN))
        start = end
    return found
