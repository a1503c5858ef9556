"""Walk the nodes of a graph, and find the words of their parameters that may be addresses.

Parameters are read through ``/proc/self/mem``, where a wrong address is an error and no crash: the driver says where
they lie, and drivers differ. What cannot be read is counted, and never stops a capture.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

KERNEL, MEMCPY, MEMSET, HOST, GRAPH = range(5)  # CU_GRAPH_NODE_TYPE_...
_SILENT = {5, 6, 7}  # empty nodes and events, which touch no memory
_OTHERS = {
    HOST: "host callback",
    8: "external semaphore",
    9: "external semaphore",
    10: "allocation",
    11: "deallocation",
}
_OTHERS |= {12: "batch of memory operations", 13: "conditional node"}
_DEVICE_MEMORY = (2, 4)  # CU_MEMORYTYPE_DEVICE, UNIFIED
_PACKED, _PACKED_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE
_MOST_PARAMETERS = 4096
_MOST_POINTERS = 64  # bytes of a parameter that is an array of addresses
_MOST_SPREAD = 1 << 16  # bytes that are read at once


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2, and room for what a later driver may add."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),
        ("params", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("more", ctypes.c_uint64 * 16),
    )


class _Copy(ctypes.Structure):
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


class _Set(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("sizes", ctypes.c_size_t * 2),
        ("more", ctypes.c_uint64 * 16),
    )


class Word(NamedTuple):
    """A word of a node that may be an address.

    Attributes:
        node: its place among the nodes; name: the kernel's name, or what else the node does.
        certain: False for a word of a struct, which may be padding.
    """

    node: int
    name: str
    value: int
    certain: bool


class ProcessMemory:
    """Reads this process's memory; an address that is none raises OSError."""

    def __enter__(self) -> ProcessMemory:
        self._file = os.open("/proc/self/mem", os.O_RDONLY)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)

    def read(self, address: int, size: int) -> bytes:
        found = os.pread(self._file, size, address)
        if len(found) != size:
            raise OSError(f"{len(found)} of {size} bytes")
        return found


@dataclasses.dataclass
class NodeReader:
    """Reads the nodes of graphs.

    Args:
        driver: the CUDA driver.
        memory: reads where it says that parameters lie.
        low: the lowest address that counts; high: the first above all of them.

    Attributes:
        nodes: how many nodes were met.
        notes: what could not be read.
    """

    driver: Any
    memory: Any
    low: int
    high: int
    nodes: int = 0
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    _functions: dict[tuple[int, int], tuple[str, list[tuple[int, int]] | None]] = dataclasses.field(
        default_factory=dict
    )

    def words(self, graph: int) -> Iterator[Word]:
        """Yield the words of a graph's nodes, and of graphs inside, that may be addresses."""
        for node in self._nodes(graph):
            index, self.nodes = self.nodes, self.nodes + 1
            handle, kind = ctypes.c_void_p(node), ctypes.c_int(-1)
            if self.driver.cuGraphNodeGetType(handle, ctypes.byref(kind)):
                self.notes["node without a type"] += 1
            elif kind.value == KERNEL:
                yield from self._kernel(index, handle)
            elif kind.value == MEMCPY:
                yield from self._copy(index, handle)
            elif kind.value == MEMSET:
                yield from self._set(index, handle)
            elif kind.value == GRAPH:
                inner = ctypes.c_void_p()
                if self.driver.cuGraphChildGraphNodeGetGraph(handle, ctypes.byref(inner)):
                    self.notes["graph inside"] += 1
                else:
                    yield from self.words(inner.value or 0)
            elif kind.value not in _SILENT:
                self.notes[_OTHERS.get(kind.value, f"node of kind {kind.value}")] += 1

    def _nodes(self, graph: int) -> Sequence[int]:
        count = ctypes.c_size_t()
        if self.driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)) or not count.value:
            return ()
        nodes = (ctypes.c_uint64 * count.value)()
        failed = self.driver.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count))
        return () if failed else list(nodes)

    def _counts(self, value: int) -> bool:
        return self.low <= value < self.high

    def _copy(self, index: int, node: Any) -> Iterator[Word]:
        copy = _Copy()
        if self.driver.cuGraphMemcpyNodeGetParams(node, ctypes.byref(copy)):
            self.notes["copy"] += 1
            return
        if copy.source_type in _DEVICE_MEMORY and self._counts(copy.source):
            yield Word(index, "copy from", copy.source, True)
        if copy.target_type in _DEVICE_MEMORY and self._counts(copy.target):
            yield Word(index, "copy to", copy.target, True)

    def _set(self, index: int, node: Any) -> Iterator[Word]:
        target = _Set()
        if self.driver.cuGraphMemsetNodeGetParams(node, ctypes.byref(target)):
            self.notes["memset"] += 1
        elif self._counts(target.target):
            yield Word(index, "memset", target.target, True)

    def _kernel(self, index: int, node: Any) -> Iterator[Word]:
        kernel = _Kernel()
        if self.driver.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(kernel)):
            self.notes["kernel"] += 1
            return
        name, layout = self._function(kernel.func or 0, kernel.kern or 0)
        try:
            parameters = None if layout is None else self._parameters(kernel, layout)
        except (OSError, OverflowError, struct.error):
            parameters = None
        if parameters is None:
            self.notes[f"parameters of {name}"] += 1
            return
        for parameter in parameters:
            if len(parameter) >= 8:
                words = struct.unpack_from(f"<{len(parameter) // 8}Q", parameter)
                found = [word for word in words if self._counts(word)]
                certain = len(found) == len(words) and len(parameter) % 8 == 0 and len(parameter) <= _MOST_POINTERS
                for word in found:
                    yield Word(index, name, word, certain)

    def _parameters(self, kernel: _Kernel, layout: Sequence[tuple[int, int]]) -> list[bytes] | None:
        """Read the parameters of a launch: each by its own address, or all from one buffer."""
        if not layout:
            return []
        if kernel.params:
            pointers = struct.unpack(f"<{len(layout)}Q", self.memory.read(kernel.params, 8 * len(layout)))
            start = min(pointers)
            end = max(pointer + size for pointer, (_, size) in zip(pointers, layout, strict=True))
            pairs = [(pointer - start, size) for pointer, (_, size) in zip(pointers, layout, strict=True)]
            if end - start <= _MOST_SPREAD:
                try:
                    return _cut(self.memory.read(start, end - start), pairs)
                except OSError:
                    pass  # something between them is not there
            return [self.memory.read(start + offset, size) for offset, size in pairs]
        if kernel.extra:
            options = struct.unpack("<5Q", self.memory.read(kernel.extra, 40))
            given = dict(zip(options[:4:2], options[1:4:2], strict=True))
            if {_PACKED, _PACKED_SIZE} <= given.keys():
                size = int.from_bytes(self.memory.read(given[_PACKED_SIZE], 8), "little")
                return _cut(self.memory.read(given[_PACKED], min(size, _MOST_SPREAD)), layout)
        return None

    def _function(self, func: int, kern: int) -> tuple[str, list[tuple[int, int]] | None]:
        """Return a kernel's name, and offset and size of each parameter; None where the driver does not say."""
        if (func, kern) not in self._functions:
            handle, kind = (func, "Func") if func else (kern, "Kernel")
            self._functions[func, kern] = self._name(handle, kind), self._layout(handle, kind)
        return self._functions[func, kern]

    def _name(self, handle: int, kind: str) -> str:
        name, read = ctypes.c_char_p(), getattr(self.driver, f"cu{kind}GetName", None)
        if read is None or read(ctypes.byref(name), ctypes.c_void_p(handle)) or name.value is None:
            return "a kernel without a name"
        return name.value.decode(errors="replace")

    def _layout(self, handle: int, kind: str) -> list[tuple[int, int]] | None:
        read = getattr(self.driver, f"cu{kind}GetParamInfo", None)
        if read is None or not handle:
            return None
        layout: list[tuple[int, int]] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while len(layout) < _MOST_PARAMETERS:
            index = ctypes.c_size_t(len(layout))
            if read(ctypes.c_void_p(handle), index, ctypes.byref(offset), ctypes.byref(size)):
                return layout
            layout.append((offset.value, size.value))
        return None


def _cut(buffer: bytes, layout: Sequence[tuple[int, int]]) -> list[bytes]:
    return [buffer[offset : offset + size] for offset, size in layout]
