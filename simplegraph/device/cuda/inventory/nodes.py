"""Visit the nodes of a graph, and find the words of their parameters that may be addresses.

The driver tells where parameters are, and they are read from this process's memory. Unreadable parameters are counted;
they never stop a capture.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import dataclasses
import functools
import os
import re
import struct
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

Piece = tuple[int, int]  # an address, and the number of bytes there or, for a range, the end
_MAX_APART = 1 << 12  # the largest gap, in bytes, that is read along: a separate read would take longer
_MAX_AT_ONCE = 1 << 18
# Lines of readable ranges: "7f07a0000000-7f07a0021000 rw-p 00000000 00:00 0", and the name of a file if there is one.
_READABLE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) r[^/\n]*(?:/(?!dev/nvidia).*)?$", re.MULTILINE)


class ProcessMemory:
    """Reads this process's memory through ``/proc/self/mem``, where a wrong address is an error instead of a crash."""

    def __enter__(self) -> ProcessMemory:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def read(self, pieces: Sequence[Piece]) -> list[bytes | None]:
        """Read pieces of memory, nearby pieces together; None for a piece that cannot be read."""
        contents: list[bytes | None] = [None] * len(pieces)
        order = sorted(range(len(pieces)), key=pieces.__getitem__)
        begin = 0
        while begin < len(order):
            start, size = pieces[order[begin]]
            end, last = start + size, begin + 1
            while last < len(order):
                address, size = pieces[order[last]]
                if address > end + _MAX_APART or address + size > start + _MAX_AT_ONCE:
                    break
                end, last = max(end, address + size), last + 1
            whole = self._read(start, end - start)
            for index in order[begin:last]:
                address, size = pieces[index]
                at = address - start
                contents[index] = self._read(address, size) if whole is None else whole[at : at + size]
            begin = last
        return contents

    def _read(self, address: int, size: int) -> bytes | None:
        try:
            content = os.pread(self._file, size, address)
        except (OSError, OverflowError):
            return None
        return content if len(content) == size else None

    @functools.cached_property
    def _mapped(self) -> list[Piece]:
        with open("/proc/self/maps", "rb") as file:
            return readable_ranges(file.read())

    def holds(self, address: int) -> bool:
        """True for an address of host memory, which is no address of device memory: both share one address space.

        Libraries pass unused addresses of their stack to kernels, as cuBLAS does for factors that it also passes by
        value. An address of the host may have been an address of a device before.
        """
        at = bisect.bisect_right(self._mapped, (address, 1 << 64)) - 1
        return at >= 0 and address < self._mapped[at][1]


def readable_ranges(maps: bytes) -> list[Piece]:
    """Return the ranges of host memory that can be read: starts and ends, in order.

    Args:
        maps: the mapped ranges, as in ``/proc/self/maps``; device memory belongs to a driver's file, or is unreadable.
    """
    return [(int(start, 16), int(end, 16)) for start, end in _READABLE.findall(maps)]


# A word that may be an address. A plain tuple, since there are many: the index of the node, the name of the kernel or
# of the node's operation, the word, False if it is in a struct, and the index of the parameter (-1 if it is no kernel).
Word = tuple[int, str, int, bool, int]


class KernelParameters(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("more", ctypes.c_uint64 * 16),
    )


class CopyParameters(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _side = ("x", "y", "z", "lod")
    _fields_ = (
        *((f"source_{name}", ctypes.c_size_t) for name in _side),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_rest", ctypes.c_uint64 * 4),
        *((f"target_{name}", ctypes.c_size_t) for name in _side),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_rest", ctypes.c_uint64 * 4),
        ("sizes", ctypes.c_size_t * 3),
        ("more", ctypes.c_uint64 * 16),
    )


class FillParameters(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("sizes", ctypes.c_size_t * 2),
        ("more", ctypes.c_uint64 * 16),
    )


KERNEL, MEMCPY, MEMSET, GRAPH = 0, 1, 2, 4  # CU_GRAPH_NODE_TYPE_...
_SILENT = {5, 6, 7}  # empty nodes and events, which touch no memory
_OTHERS = {
    3: "host callback",
    8: "external semaphore",
    9: "external semaphore",
    10: "allocation",
    11: "deallocation",
    12: "batch of memory operations",
    13: "conditional node",
}
_DEVICE_MEMORY = (2, 4)  # CU_MEMORYTYPE_DEVICE, UNIFIED
_MAX_PARAMETERS = 4096
_MAX_POINTERS = 64  # bytes of a parameter that is an array of addresses


class KernelFunction:
    """A function that kernel nodes launch: its name, and the layout of its parameters.

    Args:
        name: its name in the driver.
        layout: offset and size of each parameter; None if the driver does not tell.
    """

    def __init__(self, name: str, layout: list[Piece] | None) -> None:
        self.name, self.has_layout, self.layout = name, layout is not None, layout or []
        self.start = self.layout[0][0] if self.layout else 0
        self.offsets = [offset - self.start for offset, _ in self.layout]
        self.size = max((offset + size - self.start for offset, size in self.layout), default=0)
        self._owners, picked = [], "<"
        for parameter, (offset, (_, size)) in enumerate(zip(self.offsets, self.layout, strict=True)):
            self._owners += [parameter] * (size // 8)
            picked += f"{offset - struct.calcsize(picked)}x" + "Q" * (size // 8)
        self.unpack = struct.Struct(picked).unpack_from  # reads the words of all parameters
        # By parameter, its number of words if it may be an array of addresses.
        self._counts = [size // 8 if not size % 8 and size <= _MAX_POINTERS else -1 for _, size in self.layout]

    def name_words(self, node: int, words: Sequence[int], low: int, high: int) -> list[Word]:
        """List the words of a launch between two addresses; they are certain if all words of a parameter are.

        Args:
            node: the index of the launch.
            words: the words that `unpack` returned.
            low: the lowest address.
            high: the end of the addresses.
        """
        owned_words = [(owner, word) for owner, word in zip(self._owners, words, strict=True) if low <= word < high]
        counts: dict[int, int] = {}
        for owner, _ in owned_words:
            counts[owner] = counts.get(owner, 0) + 1
        name, all_of = self.name, self._counts
        return [(node, name, word, counts[owner] == all_of[owner], owner) for owner, word in owned_words]


@dataclasses.dataclass
class NodeReader:
    """Reads the nodes of graphs.

    Args:
        driver: the CUDA driver.
        memory: reads the parameters; see `ProcessMemory`.
        plain: returns True for the name of a kernel whose parameters are not read; None to read all.
        most: the most nodes to read.

    Attributes:
        nodes: the number of nodes.
        notes: descriptions of unreadable parts, with their counts.
    """

    driver: Any
    memory: Any
    plain: Callable[[str], bool] | None = None
    most: int = 20_000
    nodes: int = 0
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self._readers = {KERNEL: self._launch, MEMCPY: self._copy, MEMSET: self._fill, GRAPH: self._child}
        self._functions: dict[tuple[int | None, int | None], KernelFunction] = {}
        self._launches: list[tuple[int, KernelFunction, int | None]] = []
        self._transfers: list[list[Word]] = []  # of copies and fills
        self._kernel = KernelParameters()  # scratch
        self._kernel_at = ctypes.byref(self._kernel)

    def walk(self, graphs: Sequence[int]) -> bool:
        """Visit the nodes of graphs, and of graphs inside them; True if one of them is to be read."""
        for graph in graphs:
            self._walk(graph)
        return bool(self._launches or self._transfers)

    def words(self, low: int, high: int, wanted: Callable[[Iterable[int]], Collection[int]]) -> list[list[Word]]:
        """Return the words that may be addresses, for each node in order, including nodes of inner graphs.

        Args:
            low: the lowest address.
            high: the end of the addresses.
            wanted: picks the words whose nodes count.
        """
        read = self._read_launches()
        transfers = [[word for word in words if low <= word[2] < high] for words in self._transfers]
        every = {word for _, _, words in read for word in words}.union(word[2] for words in transfers for word in words)
        chosen = set(wanted([word for word in every if low <= word < high]))
        nodes = [
            function.name_words(index, words, low, high)
            for index, function, words in read
            if not chosen.isdisjoint(words)
        ]
        nodes += [words for words in transfers if not chosen.isdisjoint(word[2] for word in words)]
        return sorted(nodes)

    def _walk(self, graph: int) -> None:
        """Ask the driver for each node of a graph. Launches are noted; all their parameters are read together later."""
        ask, handle, kind = self.driver.cuGraphNodeGetType, ctypes.c_void_p(), ctypes.c_int()
        kind_at, readers = ctypes.byref(kind), self._readers
        for node in self._nodes(graph):
            index, self.nodes = self.nodes, self.nodes + 1
            handle.value = node
            if index >= self.most:
                self.notes[f"nodes behind the first {self.most}"] = 1
            elif ask(handle, kind_at):
                self.notes["node without a type"] += 1
            elif kind.value in readers:
                readers[kind.value](index, handle)
            elif kind.value not in _SILENT:
                self.notes[_OTHERS.get(kind.value, f"node of kind {kind.value}")] += 1

    def _nodes(self, graph: int) -> Sequence[int]:
        count = ctypes.c_size_t()
        if self.driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)) or not count.value:
            return ()
        nodes = (ctypes.c_uint64 * count.value)()
        failed = self.driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count))
        return () if failed else list(nodes)

    def _child(self, index: int, node: Any) -> None:
        inner = ctypes.c_void_p()
        if self.driver.cuGraphChildGraphNodeGetGraph(node, ctypes.byref(inner)):
            self.notes["graph inside"] += 1
        else:
            self._walk(inner.value or 0)

    def _copy(self, index: int, node: Any) -> None:
        copy = CopyParameters()
        if self.driver.cuGraphMemcpyNodeGetParams(node, ctypes.byref(copy)):
            self.notes["copy"] += 1
            return
        ends = ("copy from", copy.source_type, copy.source), ("copy to", copy.target_type, copy.target)
        self._take(index, [(name, address) for name, kind, address in ends if kind in _DEVICE_MEMORY])

    def _fill(self, index: int, node: Any) -> None:
        fill = FillParameters()
        if self.driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(fill)):
            self.notes["memset"] += 1
        else:
            self._take(index, [("memset", fill.target)])

    def _take(self, index: int, addresses: Sequence[tuple[str, int]]) -> None:
        self._transfers.append([(index, name, value, True, -1) for name, value in addresses])

    # Kernels.

    def _launch(self, index: int, node: Any) -> None:
        kernel = self._kernel
        if self.driver.cuGraphKernelNodeGetParams_v2(node, self._kernel_at):
            self.notes["kernel"] += 1
            return
        handles = kernel.func, kernel.kern
        function = self._functions.get(handles)
        if function is None:
            function = self._functions[handles] = self._function(*handles)
        if not function.has_layout:
            self.notes[f"parameters of {function.name}"] += 1
        elif function.layout and not (self.plain is not None and self.plain(function.name)):
            self._launches.append((index, function, kernel.params))

    def _read_launches(self) -> list[tuple[int, KernelFunction, tuple[int, ...]]]:
        """Read the parameters of all launches; return their words."""
        # Two steps, each for all launches together: read the addresses of parameters, then the parameters.
        lists = self.memory.read([(params or 0, 8 * len(function.layout)) for _, function, params in self._launches])
        by_launch = [
            [] if addresses is None else places_of(function, struct.unpack(f"<{len(function.layout)}Q", addresses))
            for (_, function, _), addresses in zip(self._launches, lists, strict=True)
        ]
        contents = iter(self.memory.read([piece for pieces in by_launch for piece in pieces]))
        read: list[tuple[int, KernelFunction, tuple[int, ...]]] = []
        for (index, function, _), pieces in zip(self._launches, by_launch, strict=True):
            parts = [next(contents) for _ in pieces]
            if not parts or None in parts:
                self.notes[f"parameters of {function.name}"] += 1
            else:
                read.append((index, function, function.unpack(joined(function, parts))))
        return read

    def _function(self, func: int | None, kern: int | None) -> KernelFunction:
        handle, kind = (func, "Func") if func else (kern, "Kernel")
        return KernelFunction(self._name(handle, kind), self._layout(handle, kind))

    def _name(self, handle: int | None, kind: str) -> str:
        name, read = ctypes.c_char_p(), getattr(self.driver, f"cu{kind}GetName", None)
        if read is None or read(ctypes.byref(name), ctypes.c_void_p(handle)) or name.value is None:
            return "a kernel without a name"
        return name.value.decode(errors="replace")

    def _layout(self, handle: int | None, kind: str) -> list[Piece] | None:
        """Return offset and size of each parameter; None if the driver does not tell."""
        read = getattr(self.driver, f"cu{kind}GetParamInfo", None)
        if read is None or not handle:
            return None
        layout: list[Piece] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while len(layout) < _MAX_PARAMETERS:
            index = ctypes.c_size_t(len(layout))
            if read(ctypes.c_void_p(handle), index, ctypes.byref(offset), ctypes.byref(size)):
                return layout
            layout.append((offset.value, size.value))
        return None


def places_of(function: KernelFunction, pointers: Sequence[int]) -> list[Piece]:
    """Return the pieces of memory that hold the parameters: one piece if they are contiguous for the function."""
    start = pointers[0]
    if [pointer - start for pointer in pointers] == function.offsets:
        return [(start, function.size)]
    return [(pointer, size) for pointer, (_, size) in zip(pointers, function.layout, strict=True)]


def joined(function: KernelFunction, parts: Sequence[bytes | None]) -> bytes:
    """Join parameters in the layout of the function; a single part is the whole layout."""
    if len(parts) == 1:
        return parts[0] or b""
    whole = bytearray(function.size)
    for offset, part in zip(function.offsets, parts, strict=True):
        whole[offset : offset + len(part or b"")] = part or b""
    return bytes(whole)
