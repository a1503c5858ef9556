"""Take the inventory of captured graphs: ask the driver which memory they touch."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch

from simplegraph.device.cuda import allocator
from simplegraph.device.cuda.device import CudaDevice
from simplegraph.device.cuda.driver import cuda_driver
from simplegraph.device.protocol import GraphDevice, GraphPool, Inventory, MemorySpan

_MAX_FORMER = 1 << 11  # the most former ranges; each costs every inventory half a microsecond


def take_inventory(
    device: GraphDevice, pool: GraphPool, segments: Sequence[Any], named: Sequence[MemorySpan], *, every: bool = False
) -> Inventory | None:
    """Read the memory that captured segments of a pool touch.

    Args:
        device: the device of the segments.
        pool: the pool of the segments.
        segments: captured segments that are not reset.
        named: memory that the owner of the segments keeps alive.
        every: True to list kernels that touch only memory with a known owner, too.

    Returns:
        The inventory; None if there is no driver. A replay of the emulator refuses freed memory by itself.
    """
    if not isinstance(device, CudaDevice):
        return None
    # Loaded only if there is a driver.
    from simplegraph.device.cuda.inventory.places import Places, device_memory, read_inventory
    from simplegraph.device.kernel_names import launched_by_torch

    driver, cuda = cuda_driver(), device

    def places() -> Places:
        present = [segment for segment in allocator.segments() if segment["device"] == cuda.index]
        own_pools, workspaces = pool.handle.anchors, cuda.allocations.workspaces
        current = Places(present, own_pools, workspaces, named, cuda.former, device_memory(driver))
        cuda.former = current.present | (cuda.former if len(cuda.former) < _MAX_FORMER else set())
        return current

    try:
        with torch.cuda.device(cuda.torch_device):
            graphs = [segment.raw_graph for segment in segments]
            return read_inventory(driver, graphs, places, every=every, plain=launched_by_torch)
    except Exception as error:  # a report is not worth a capture
        return Inventory(notes=collections.Counter([f"{type(error).__name__}: {error}"]))
