"""Captured `torch.cuda.CUDAGraph` objects, their memory pool, and their end."""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import weakref

import torch

from simplegraph.device.cuda.allocator import Addresses

# Graphs that are no longer used. They are destroyed under CAPTURE_LOCK: destroying a graph unregisters it from its
# generators, which another thread's capture may be changing without the interpreter's lock.
graveyard: collections.deque[torch.cuda.CUDAGraph] = collections.deque()


# Instantiates graphs while the next graphs are captured; this takes a fifth of a capture's time.
_instantiating = concurrent.futures.ThreadPoolExecutor(1, "simplegraph-instantiate")


class OwnedGraph:
    """Owns a `torch.cuda.CUDAGraph`, and ends it: its memory at once, the graph itself when no capture runs.

    Args:
        graph: the graph.
        ready: done once another thread has instantiated the graph; None if none does.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, ready: concurrent.futures.Future[None] | None = None) -> None:
        self.graph = graph
        self.reset = weakref.finalize(self, _bury, graph, ready)
        self.reset.atexit = False


def _bury(graph: torch.cuda.CUDAGraph, ready: concurrent.futures.Future[None] | None) -> None:
    if ready is not None and not ready.cancel():
        ready.exception()  # waits without raising: `CudaSegment.wait` raises the error
    graveyard.append(graph)
    if not torch.cuda.is_current_stream_capturing():
        graph.reset()


@dataclasses.dataclass(eq=False)
class CudaPool:
    """A memory pool of torch's allocator, or several pools after failed captures.

    Attributes:
        id: the id of the allocator's pool for captures.
        anchors: by id, a graph of one node. While it lives, the allocator keeps the pool's memory, and captures into
            the pool are possible. Without any graph they are not (an internal assert).
        segments: by id, the number of live graphs.
        addresses: the known address ranges of the pools.
        owned: addresses of blocks in use at the latest check; owned_before: before the last Program.
    """

    id: tuple[int, int]
    anchors: dict[tuple[int, int], OwnedGraph] = dataclasses.field(default_factory=dict)
    segments: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)
    addresses: Addresses = dataclasses.field(default_factory=Addresses)
    owned: set[int] = dataclasses.field(default_factory=set)
    owned_before: set[int] = dataclasses.field(default_factory=set)

    def dropped(self, pool_id: tuple[int, int]) -> None:
        """Count the end of one of a pool's graphs."""
        self.segments[pool_id] -= 1
        self.retire(pool_id)

    def retire(self, pool_id: tuple[int, int]) -> None:
        """Release a pool that captures no longer use, if its last graph is gone."""
        if pool_id != self.id and not self.segments[pool_id] and pool_id in self.anchors:
            del self.anchors[pool_id]
            self.addresses = Addresses()


class CudaSegment:
    """One `torch.cuda.CUDAGraph`."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, pool: CudaPool, num_nodes: int | None, device: torch.device
    ) -> None:
        self.num_nodes = num_nodes
        self._ready = _instantiating.submit(_instantiate, graph, device)
        self._owned = OwnedGraph(graph, self._ready)
        self._count = weakref.finalize(self, pool.dropped, pool.id)
        self._count.atexit = False
        pool.segments[pool.id] += 1
        self.replay = graph.replay  # the bound C++ method: a replay enters no Python frame of ours

    @property
    def raw_graph(self) -> int:
        """Return the driver's handle of the graph."""
        return int(self._owned.graph.raw_cuda_graph())

    def wait(self) -> None:
        self._ready.result()

    def reset(self) -> None:
        self._owned.reset()
        self._count()


def _instantiate(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    with torch.cuda.device(device):
        graph.instantiate()
