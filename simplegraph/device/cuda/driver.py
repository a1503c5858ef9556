"""Driver calls that torch does not offer: separate streams, and the operations that a capture has and waits for."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from typing import Any

_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_COMPUTES = (0, 1, 2, 4)  # CU_GRAPH_NODE_TYPE_KERNEL, MEMCPY, MEMSET and GRAPH; others are events and the like


def captured_nodes(stream: int) -> int | None:
    """Count the operations captured so far on a stream (a raw handle); None if the driver does not tell."""
    capture = captured_so_far(stream)
    return None if capture is None else capture[1]


def captured_so_far(stream: int) -> tuple[int, int] | None:
    """Return the number of the capture, and the count of its operations so far; see `captured_nodes`.

    This runs twice for each operator of a capture, so it uses as little Python as possible.
    """
    driver = cuda_driver()
    if driver is None:
        return None
    handle = ctypes.c_void_p(stream)
    if driver.cuStreamGetCaptureInfo_v2(handle, *_CAPTURE_INFO, None, None) or _STATUS.value != _ACTIVE:
        return None
    return None if driver.cuGraphGetNodes(_GRAPH, None, _COUNT_AT) else (_NUMBER.value, _COUNT.value)


# Outputs of the driver call. Threads may share them, since a thread that captures holds CAPTURE_LOCK.
_STATUS, _NUMBER, _GRAPH, _COUNT = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
_CAPTURE_INFO, _COUNT_AT = (ctypes.byref(_STATUS), ctypes.byref(_NUMBER), ctypes.byref(_GRAPH)), ctypes.byref(_COUNT)


def unjoined_operations(stream: int) -> int:
    """Count captured operations that a stream (a raw handle) does not wait for; 0 if the driver does not tell.

    CUDA refuses to end a capture with such operations, unless a library has set the dependencies of its streams itself,
    as NCCL does. A collective without a wait would then run concurrently with operators that read its result.
    """
    driver = cuda_driver()
    if driver is None or not hasattr(driver, "cuStreamGetCaptureInfo_v3") or not hasattr(driver, "cuGraphGetEdges_v2"):
        return 0
    status, identity, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    ends, count, data = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t(), ctypes.c_void_p()
    outputs = (ctypes.byref(one) for one in (status, identity, graph, ends, data, count))
    if driver.cuStreamGetCaptureInfo_v3(ctypes.c_void_p(stream), *outputs) or status.value != _ACTIVE:
        return 0
    waited_for = [ends[index] for index in range(count.value)]
    nodes, (starts, targets) = _nodes(driver, graph), _edges(driver, graph)
    if set(nodes).difference(starts) <= set(waited_for):
        return 0  # all paths end there; this saves a walk of a millisecond
    reached = nodes_reaching(waited_for, starts, targets)
    return sum(_computes(driver, node) for node in nodes if node not in reached)


def nodes_reaching(ends: Iterable[Any], starts: Sequence[Any], targets: Sequence[Any]) -> set[Any]:
    """Find the nodes from which a path leads to one of `ends`, including these.

    Args:
        ends: the nodes at which paths end.
        starts: the first node of each edge.
        targets: the second node of each edge.
    """
    before: dict[Any, list[Any]] = {}
    for start, target in zip(starts, targets, strict=True):
        before.setdefault(target, []).append(start)
    reached, pending = set(ends), list(ends)
    while pending:
        new = [node for node in before.get(pending.pop(), ()) if node not in reached]
        reached.update(new)
        pending += new
    return reached


def _nodes(driver: Any, graph: Any) -> list[int]:
    count = ctypes.c_size_t()
    driver.cuGraphGetNodes(graph, None, ctypes.byref(count))
    nodes = (ctypes.c_uint64 * count.value)()
    driver.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
    return list(nodes)


def _edges(driver: Any, graph: Any) -> tuple[list[int], list[int]]:
    """List the start nodes and the target nodes of all edges."""
    count = ctypes.c_size_t()
    driver.cuGraphGetEdges_v2(graph, None, None, None, ctypes.byref(count))
    # The third output is 8 bytes of data for each edge. Without it, the driver refuses edges with data.
    starts, targets, data = ((ctypes.c_uint64 * count.value)() for _ in range(3))
    driver.cuGraphGetEdges_v2(graph, starts, targets, data, ctypes.byref(count))
    return list(starts), list(targets)


def _computes(driver: Any, node: int) -> bool:
    kind = ctypes.c_int(-1)
    driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value in _COMPUTES


def new_stream() -> int | None:
    """Make a stream on the current device, and return its raw handle; None if the driver cannot."""
    driver, handle = cuda_driver(), ctypes.c_void_p()
    failed = driver is None or driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING)
    return None if failed else handle.value


@functools.cache
def cuda_driver() -> Any:
    """Return the CUDA driver, which torch has loaded, to call its functions by name; None if there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        _ = driver.cuStreamCreate, driver.cuStreamGetCaptureInfo_v2, driver.cuGraphGetNodes
    except (OSError, AttributeError):
        return None
    return driver
