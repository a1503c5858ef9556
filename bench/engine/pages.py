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
        page_size: tokens in a page.
        window: keys that a token sees, its own included; None for all before it.

    Attributes:
        table: (num_slots, max_blocks) int32, page ids; 0 for those that were given back.
    """

    def __init__(
        self, num_pages: int, num_slots: int, max_blocks: int, page_size: int = 1, window: int | None = None
    ) -> None:
        self._page_size, self._window = page_size, window
        self._first = [0] * num_slots  # pages of each slot that were given back
        self.table: npt.NDArray[np.int32] = np.zeros((num_slots, max_blocks), np.int32)
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def most_owned(self, tokens: int, in_step: int) -> int:
        """Return the pages that a request of `tokens` tokens can own at once, in steps of up to `in_step`."""
        if self._window is not None:
            tokens = min(tokens, self._window - 1 + in_step + self._page_size - 1)
        return -(-tokens // self._page_size)

    def give_back(self, slot: int, num_computed: int) -> None:
        """Free a slot's pages that no token from `num_computed` on sees.

        Steps that still read them come before those of the next owner on the same stream.
        """
        if self._window is None:
            return
        first = max(0, num_computed - (self._window - 1)) // self._page_size
        if first > self._first[slot]:
            self._release(slot, self._first[slot], first)
            self._first[slot] = first

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
        self.shrink(slot, owned, self._first[slot])
        self._first[slot] = 0

    def shrink(self, slot: int, owned: int, kept: int) -> None:
        """Free a slot's pages beyond its first `kept`."""
        self._release(slot, kept, owned)

    def _release(self, slot: int, start: int, end: int) -> None:
        self._free.extend(self.table[slot, start:end][::-1].tolist())
        self.table[slot, start:end] = 0
