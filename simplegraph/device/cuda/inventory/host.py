"""Read this process's memory where the driver says that parameters lie, and tell its addresses from a device's."""

from __future__ import annotations

import bisect
import functools
import os
import re
from collections.abc import Sequence

Piece = tuple[int, int]  # an address, and how many bytes from there or, of a range, the end
_MOST_APART = 1 << 12  # bytes that are read in between, since a read takes longer than they do
_MOST_AT_ONCE = 1 << 18
# Lines of what the host can read: "7f07a0000000-7f07a0021000 rw-p 00000000 00:00 0", and a file if it is one's.
_READABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r[^/\n]*(?:/(?!dev/nvidia).*)?$", re.MULTILINE)


class ProcessMemory:
    """Reads this process's memory through ``/proc/self/mem``, where a wrong address is an error and no crash."""

    def __enter__(self) -> ProcessMemory:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def read(self, pieces: Sequence[Piece]) -> list[bytes | None]:
        """Read pieces, those that lie near each other at once; None for one that is not there."""
        found: list[bytes | None] = [None] * len(pieces)
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        begin = 0
        while begin < len(order):
            start, size = pieces[order[begin]]
            end, last = start + size, begin + 1
            while last < len(order):
                address, size = pieces[order[last]]
                if address > end + _MOST_APART or address + size > start + _MOST_AT_ONCE:
                    break
                end, last = max(end, address + size), last + 1
            whole = self._read(start, end - start)
            for index in order[begin:last]:
                address, size = pieces[index]
                at = address - start
                found[index] = self._read(address, size) if whole is None else whole[at : at + size]
            begin = last
        return found

    def _read(self, address: int, size: int) -> bytes | None:
        try:
            found = os.pread(self._file, size, address)
        except (OSError, OverflowError):
            return None
        return found if len(found) == size else None

    @functools.cached_property
    def _mapped(self) -> list[Piece]:
        with open("/proc/self/maps", "rb") as file:
            return readable_ranges(file.read())

    def holds(self, address: int) -> bool:
        """True if the host has memory there, so that no device has: they share one space of addresses.

        A library passes kernels addresses on its stack which they do not use, such as cuBLAS for factors that it passes
        by value, too. The host may have got there what a device had before.
        """
        at = bisect.bisect_right(self._mapped, (address, 1 << 64)) - 1
        return at >= 0 and address < self._mapped[at][1]


def readable_ranges(maps: bytes) -> list[Piece]:
    """Return where the host can read by itself: starts and ends, in order.

    Args:
        maps: what is mapped, as ``/proc/self/maps`` lists it; a device's memory is of its driver's file, or unreadable.
    """
    return [(int(start, 16), int(end, 16)) for start, end in _READABLE.findall(maps)]
