"""Assigns pages of the KV cache to requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class PageAllocator:
    """The free pages of the cache, and the table of the pages that each running request's slot owns.

    Args:
        num_pages: of the cache; page 0 is reserved for padding.
        num_slots: requests that can run at once.
        max_blocks: pages a request can have.

    Attributes:
        table: (num_slots, max_blocks) int32, page ids.
    """

    def __init__(self, num_pages: int, num_slots: int, max_blocks: int) -> None:
        self.table: npt.NDArray[np.int32] = np.zeros((num_slots, max_blocks), np.int32)
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def grow(self, slot: int, owned: int, needed: int) -> bool:
        """Give a slot pages up to `needed`; False, without giving any, if there are too few."""
        more = needed - owned
        if more > len(self._free):
            return False
        for column in range(owned, needed):
            self.table[slot, column] = self._free.pop()
        return True

    def free(self, slot: int, owned: int) -> None:
        """Free all pages of a slot."""
        self.shrink(slot, owned, 0)

    def shrink(self, slot: int, owned: int, kept: int) -> None:
        """Free a slot's pages beyond its first `kept`."""
        self._free.extend(self.table[slot, kept:owned][::-1].tolist())
        self.table[slot, kept:owned] = 0
