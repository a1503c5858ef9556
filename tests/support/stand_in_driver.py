"""A stand-in for CUDA's driver, which tells nodes of graphs with parameters in memory of this process."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any


class Kernel:
    """A kernel node: its parameters, each as bytes, given one by one."""

    kind = 0

    def __init__(self, name: str, *parameters: bytes, function: bool = True, together: bool = False) -> None:
        self.name, self.parameters, self.function = name, parameters, function
        self.buffers = [ctypes.create_string_buffer(each, len(each)) for each in parameters]
        self.addresses = (ctypes.c_void_p * max(1, len(parameters)))(*map(ctypes.addressof, self.buffers))
        self.buffer = ctypes.create_string_buffer(b"".join(parameters), sum(map(len, parameters)))
        if together:
            starts = [sum(map(len, parameters[:index])) for index in range(len(parameters))]
            self.addresses[:] = [ctypes.addressof(self.buffer) + start for start in starts]

    def fill(self, out: Any) -> None:
        out.func, out.kern = (id(self), None) if self.function else (None, id(self))
        out.params = ctypes.addressof(self.addresses)


class Other:
    """A node of another kind: fields that the driver fills in, or a graph inside."""

    def __init__(self, kind: int, inside: Sequence[Any] = (), **fields: Any) -> None:
        self.kind, self.inside, self.fields = kind, inside, fields

    def fill(self, out: Any) -> None:
        for name, value in self.fields.items():
            setattr(out, name, value)


class Driver:
    """Answers of CUDA's driver about graphs, which are lists of nodes."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.graphs = {1: list(nodes)}
        self.nodes: dict[int, Any] = {}
        self._take(nodes)

    def _take(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            self.nodes[id(node)] = node
            if getattr(node, "inside", ()):
                self.graphs[id(node)] = list(node.inside)
                self._take(node.inside)

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        found = self.graphs[graph.value]
        count._obj.value = len(found)
        if nodes is not None:
            nodes[:] = [id(node) for node in found]
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value].kind
        return 0

    def _fill(self, node: Any, out: Any) -> int:
        self.nodes[node.value].fill(out._obj)
        return 0

    def cuGraphNodeGetParams(self, node: Any, out: Any) -> int:
        inside = self.nodes[node.value].inside
        self.bodies = (ctypes.c_uint64 * len(inside))(*map(id, inside))  # as long as the driver lives
        for body in inside:
            self.graphs[id(body)] = [body]
        out._obj.count, out._obj.graphs = len(inside), ctypes.addressof(self.bodies)
        return 0

    cuGraphKernelNodeGetParams_v2 = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _fill

    def cuGraphChildGraphNodeGetGraph(self, node: Any, graph: Any) -> int:
        graph._obj.value = node.value
        return 0

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        parameters = self.nodes[function.value].parameters
        if index.value >= len(parameters):
            return 1
        offset._obj.value = sum(map(len, parameters[: index.value]))
        size._obj.value = len(parameters[index.value])
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        name._obj.value = self.nodes[function.value].name.encode()
        return 0

    cuKernelGetParamInfo, cuKernelGetName = cuFuncGetParamInfo, cuFuncGetName


def pointer(*addresses: int) -> bytes:
    return struct.pack(f"<{len(addresses)}Q", *addresses)
