"""Ask torch's CUDA allocator which pool an address belongs to, and set the pool of this thread's allocations."""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.modes import outside_modes

logger = logging.getLogger("simplegraph")

PoolId = tuple[int, int]
_DEFAULT: PoolId = (0, 0)
# Private to torch. Without them, allocations are not diverted.
_CAN_DIVERT = all(
    hasattr(torch._C, f"_cuda_{name}")
    for name in ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool")
)


def segments(pool_ids: Container[PoolId] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the allocator's descriptions of the segments of these pools; of all pools if None."""
    # Torch is asked for all pools: asked for one pool by id, torch 2.11 corrupts the interpreter's heap after some
    # hundred pools, which leads to crashes later.
    snapshot: list[dict[str, Any]] = torch.cuda.memory.memory_snapshot()  # type: ignore[no-untyped-call]
    return (segment for segment in snapshot if pool_ids is None or tuple(segment["segment_pool_id"]) in pool_ids)


def owned_addresses(pool_id: PoolId) -> set[int]:
    """List the addresses of a pool's blocks that are in use."""
    owned = set()
    for segment in segments((pool_id,)):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                owned.add(address)
            address += block["size"]
    return owned


class Addresses:
    """Remembers which address ranges belong to certain pools, and which do not: asking torch takes milliseconds."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, bool]] = []  # (start, end, True if in the pools), ordered
        self._foreign: set[int] = set()  # addresses that torch did not allocate

    def look_up(self, address: int) -> bool | None:
        """Return True for memory of the pools, False for other memory, None if that is not known."""
        at = bisect.bisect_right(self._ranges, (address, 1 << 64, True)) - 1
        if at >= 0 and address < self._ranges[at][1]:
            return self._ranges[at][2]
        return False if address in self._foreign else None

    def find(self, address: int, pool_ids: Container[PoolId]) -> bool:
        """Return True for memory of the pools; ask torch if that is not known."""
        is_ours = self.look_up(address)
        if is_ours is None:
            ranges = [
                (
                    segment["address"],
                    segment["address"] + segment["total_size"],
                    tuple(segment["segment_pool_id"]) in pool_ids,
                )
                for segment in segments()
            ]
            self._ranges = sorted(ranges)
            is_ours = self.look_up(address)
            if is_ours is None:
                self._foreign.add(address)
        return bool(is_ours)

    def forget_others(self) -> None:
        """Forget memory outside the pools, which may be freed and allocated to the pools later."""
        self._ranges = [span for span in self._ranges if span[2]]
        self._foreign.clear()


class Allocations:
    """Routes allocations of the current thread on one device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: tuple[int, int, Tensor] | None = None  # a segment of the default pool, and a tensor that keeps it
        self._workspaces: PoolId | None = None

    @contextlib.contextmanager
    def in_captures(self) -> Iterator[None]:
        """Let captures allocate from their own pool, even inside ``torch.cuda.use_mem_pool``.

        Otherwise the graph's memory would be in that pool, and be allocated to others after the capture.
        """
        taken: list[PoolId] = []
        index = self._device.index
        try:
            while _CAN_DIVERT and (pool_id := self._diverted()) is not None and pool_id not in taken:
                torch._C._cuda_endAllocateToPool(index, pool_id)
                taken.append(pool_id)
            yield
        finally:
            for pool_id in taken:
                torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool_id)
                torch._C._cuda_releasePool(index, pool_id)  # which `begin` has counted once more

    def _diverted(self) -> PoolId | None:
        """Find the pool of this thread's allocations; None for torch's default pool."""
        probe = self._new(1)
        address = probe.data_ptr()
        if self._home is not None and self._home[0] <= address < self._home[1]:
            return None
        for segment in segments():
            start, end = segment["address"], segment["address"] + segment["total_size"]
            if start <= address < end:
                pool_id: PoolId = tuple(segment["segment_pool_id"])
                if pool_id != _DEFAULT:
                    return pool_id
                self._home = start, end, probe
        return None

    @property
    def workspaces(self) -> tuple[PoolId, ...]:
        """The pools that contain workspaces of libraries."""
        return () if self._workspaces is None else (self._workspaces,)

    def keep_workspaces(self, dtype: torch.dtype) -> None:
        """Allocate cuBLAS's workspaces for this thread and stream in memory that is never released.

        Torch keeps the workspaces in a table that other code may clear, such as compiled modules with their own graphs,
        while earlier graphs still use them. So they come from a separate pool. A matrix product makes cuBLASLt allocate
        its workspace. It has the forward's dtype, since kernels of another dtype would take 0.1 s to load.
        """
        if not _CAN_DIVERT:
            return
        index = self._device.index
        operands = [self._new(*shape, dtype=dtype) for shape in ((16,), (16, 16), (16, 16))]
        self._workspaces = self._workspaces or torch.cuda.graph_pool_handle()
        torch._C._cuda_beginAllocateCurrentThreadToPool(index, self._workspaces)
        try:
            torch._C._cuda_getCurrentBlasHandle()
            if not torch.are_deterministic_algorithms_enabled() or "CUBLAS_WORKSPACE_CONFIG" in os.environ:
                with outside_modes(), torch._C._DisableAutocast():
                    torch.ops.aten.addmm(*operands)  # cuBLASLt, which has another one
        except RuntimeError as error:  # out of memory: the forward will say so, if it needs them
            logger.debug("cuBLAS has no workspaces of our own: %s", error)
        finally:
            torch._C._cuda_endAllocateToPool(index, self._workspaces)

    def _new(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        with outside_modes():
            empty: Tensor = torch.ops.aten.empty(shape, dtype=dtype, device=self._device)
            return empty
