"""Tell whose memory an address is in: by what torch's allocator has, what is kept alive, and what was there before."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from simplegraph.device.cuda.inventory.nodes import Word
from simplegraph.device.inventory import KnownMemory, MemoryKind, Touch

PoolId = tuple[int, int]
_DEFAULT: PoolId = (0, 0)
_UNACCOUNTED = {MemoryKind.FOREIGN, MemoryKind.OUTSIDE, MemoryKind.FREED}
_LARGEST_NUMBER = 1 << 20  # in a struct: behind it, half of an address may be left that lay there before


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
        known: memory that is kept alive, by whoever it is.
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
        try:
            return self._found[address]
        except KeyError:
            found = self._found[address] = self._look_up(address)
            return found

    def _look_up(self, address: int) -> Block | None:
        for starts, blocks in self._ordered:
            at = bisect.bisect_right(starts, address) - 1
            if at >= 0 and address < blocks[at].end:
                return None if blocks is self._former and self.is_host_memory(address) else blocks[at]
        return Block(address, address, MemoryKind.OUTSIDE) if self._is_device_memory(address) else None

    def ends_before(self, address: int) -> Block | None:
        """Find the range that ends where an address begins, as the end of a tensor does."""
        return next((b for blocks in (self._known, self._blocks) for b in blocks if b.end == address), None)

    def unaccounted(self, addresses: Iterable[int]) -> list[int]:
        """Return those of memory that nothing accounts for."""
        blocks = ((address, self.find(address)) for address in addresses)
        return [address for address, block in blocks if block is not None and block.place in _UNACCOUNTED]

    def touches(self, words: Iterable[Word]) -> list[Touch]:
        """Say what a node touches by its words, each address once, without the ends of ranges.

        A small number in a struct, behind which half of an older address may be left, is no address of freed memory.
        """
        once: dict[int, Word] = {}
        for word in words:
            _, _, address, certain, _ = word
            if certain or address not in once:
                once[address] = word
        found, find = [], self.find
        for index, name, address, certain, parameter in once.values():
            block = find(address)
            if block is not None and (block.place is not MemoryKind.FREED or self._is_freed(address, certain, once)):
                offset = address - block.start
                found.append(Touch(name, address, offset, block.place, block.name, certain, parameter, index))
        return found

    def _is_freed(self, address: int, certain: bool, beside: Iterable[int]) -> bool:
        """True unless it is a number, or the end of a range that another of the node's addresses is in."""
        if not certain and address & 0xFFFFFFFF < _LARGEST_NUMBER:
            return False
        end = self.ends_before(address)
        return end is None or not any(self.find(other) == end and other >= end.last for other in beside)


def _ordered(blocks: Iterable[Block]) -> list[Block]:
    return sorted(blocks, key=operator.itemgetter(0, 1))


def _blocks(segment: dict[str, Any], own: Collection[PoolId], workspaces: Collection[PoolId]) -> list[Block]:
    pool, start = tuple(segment["segment_pool_id"]), segment["address"]
    if pool in own or pool in workspaces:  # what is free in there is the graph's, too, or the library's
        kind, end = MemoryKind.POOL if pool in own else MemoryKind.WORKSPACE, start + segment["total_size"]
        last = segment["blocks"][-1]  # what was given back is joined, so nobody can tell what ended there
        return [Block(start, end, kind, last=end - (0 if last["state"] == "inactive" else last["size"]))]
    found = []
    for block in segment["blocks"]:
        end = start + block["size"]
        free = block["state"] == "inactive" and pool == _DEFAULT
        found.append(Block(start, end, MemoryKind.FREED if free else MemoryKind.FOREIGN))
        start = end
    return found
