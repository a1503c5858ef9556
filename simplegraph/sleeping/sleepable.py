"""Allocate memory that can sleep, and list all of it."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from simplegraph.base.errors import ConfigError, refuse_inside_capture
from simplegraph.base.extras import memory_sources
from simplegraph.call.inputs import TensorArg
from simplegraph.device.cuda.allocator import segments
from simplegraph.device.emulator.memory import Arena
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, GraphPool
from simplegraph.device.select import graph_device
from simplegraph.sleeping.cuda import CudaRegion
from simplegraph.sleeping.emulated import EmulatedPool, EmulatedRegion
from simplegraph.sleeping.regions import MemoryRegion

_REGIONS: list[MemoryRegion] = []
_POOLS: weakref.WeakKeyDictionary[Arena, EmulatedPool] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def sleepable(part: str = "weights", device: torch.device | str | None = None) -> Iterator[None]:
    """Let this thread allocate memory in here that `sleep` can give back: build the model, or its caches, inside.

        with sg.sleepable():
            model = sg.wrap(build().cuda().eval())
        with sg.sleepable("caches"):
            cache = torch.zeros(...)

    What is built in one block sleeps together. From the first block on, new graphs and their static inputs can sleep,
    too. Dropped tensors' memory is given back by the next block, capture or `sleep`, as ``torch.cuda.empty_cache``
    leaves it alone. On a GPU the first block sets ``release_lock_on_cudamalloc`` of torch's allocator.

    Args:
        part: "weights", or "caches", which `sleep` and `wake` name.
        device: where; the current GPU if None, or the CPU, which is emulated, where there is none.

    Raises:
        ConfigError: `part` is another word, or the driver or torch has no such memory.
        CaptureError: the stream is being captured.
    """
    if part not in ("weights", "caches"):
        raise ConfigError(f"part is {part!r}; expected 'weights' or 'caches'.")
    graphs = graph_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    refuse_inside_capture(graphs.is_capturing())
    if not memory_sources:
        memory_sources.append(SleepableMemory())
    with _new_region(part, graphs).allocating():
        yield


def _new_region(part: str, device: GraphDevice) -> MemoryRegion:
    regions()  # gives unused ones back
    region: MemoryRegion = EmulatedRegion(part, device) if device.emulated else CudaRegion(part, device)
    _REGIONS.append(region)
    return region


class SleepableMemory:
    """Where graphs have their memory once something of the process can sleep; see `memory_sources`."""

    def graph_pool_id(self, device: GraphDevice) -> Any:
        """Make a memory pool of torch's allocator for graphs, and return its id."""
        region: Any = _new_region("graphs", device)
        return region.pool_id

    def static_memory(self, args: Sequence[Any]) -> AbstractContextManager[None]:
        """Surround the allocation of the static inputs of some arguments."""
        device = next((arg.device for arg in args if isinstance(arg, TensorArg)), None)
        return contextlib.nullcontext() if device is None else _new_region("graphs", graph_device(device)).allocating()


def regions(pools: Iterable[GraphPool] = ()) -> list[MemoryRegion]:
    """List the regions that are in use, and those of emulated pools; give back what is unused."""
    with CAPTURE_LOCK:  # which `synchronize` takes, and whoever makes a pool has: two threads may look at once
        look(_REGIONS)
        unused = [region for region in _REGIONS if region.unused and not region.asleep]
        for device in {region.device for region in unused}:
            device.synchronize()
        for region in unused:
            region.close()
            _REGIONS.remove(region)
    arenas = [pool.handle for pool in pools if isinstance(pool.handle, Arena)]
    emulated = [_POOLS.setdefault(arena, EmulatedPool(graph_device("cpu"), arena)) for arena in arenas]
    look(emulated)
    return [region for region in (*_REGIONS, *emulated) if region.blocks]


def look(found: Sequence[MemoryRegion]) -> None:
    """Let regions see what they hold now."""
    present: dict[Any, list[dict[str, Any]]] = collections.defaultdict(list)
    if any(isinstance(region, CudaRegion) for region in found):
        for segment in segments():
            present[tuple(segment["segment_pool_id"])].append(segment)
    for region in found:
        region.look(present)
