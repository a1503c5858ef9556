"""Ask torch's CUDA allocator whose memory an address is, and tell it where allocations of this thread go."""

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
# Private to torch. Where they are absent, allocations go where they go.
_CAN_DIVERT = all(
    hasattr(torch._C, f"_cuda_{name}")
    for name in ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool")
)


def segments(pool_ids: Container[PoolId] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the allocator's description of the memory of some pools, of all if None."""
    # Of all pools: asked for one by id, torch 2.11 left the interpreter's heap corrupted after some hundred
    # pools (crashes anywhere later, as from a reference too few on the id's numbers).
    found: list[dict[str, Any]] = torch.cuda.memory.memory_snapshot()  # type: ignore[no-untyped-call]
    return (segment for segment in found if pool_ids is None or tuple(segment["segment_pool_id"]) in pool_ids)


def owned_addresses(pool_id: PoolId) -> set[int]:
    """List the addresses of a pool's blocks that something owns."""
    owned = set()
    for segment in segments((pool_id,)):
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                owned.add(address)
            address += block["size"]
    return owned


class Addresses:
    """Remembers which address ranges belong to some pools, and which to others; asking torch takes milliseconds."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, bool]] = []  # (start, end, True if of the pools), ordered
        self._foreign: set[int] = set()  # addresses in no memory of torch's

    def look_up(self, address: int) -> bool | None:
        """Return True for memory of the pools, False for other memory, None where that is not known."""
        at = bisect.bisect_right(self._ranges, (address, 1 << 64, True)) - 1
        if at >= 0 and address < self._ranges[at][1]:
            return self._ranges[at][2]
        return False if address in self._foreign else None

    def find(self, address: int, pool_ids: Container[PoolId]) -> bool:
        """Return True for memory of the pools, and ask torch if need be."""
        known = self.look_up(address)
        if known is None:
            ranges = [
                (each["address"], each["address"] + each["total_size"], tuple(each["segment_pool_id"]) in pool_ids)
                for each in segments()
            ]
            self._ranges = sorted(ranges)
            known = self.look_up(address)
            if known is None:
                self._foreign.add(address)
        return bool(known)

    def forget_others(self) -> None:
        """Forget what is not the pools': it may be given back, and be theirs next."""
        self._ranges = [each for each in self._ranges if each[2]]
        self._foreign.clear()


class Allocations:
    """Routes allocations of the current thread on one device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: tuple[int, int, Tensor] | None = None  # a segment of the default pool, and what keeps it there
        self._workspaces: PoolId | None = None

    @contextlib.contextmanager
    def in_captures(self) -> Iterator[None]:
        """Let captures allocate from their own pool, though the thread is inside ``torch.cuda.use_mem_pool``.

        That one's pool would come first: the graph's memory would lie in it, and go to others after the capture.
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
        """Find the pool that an allocation of this thread comes from; None for torch's default one."""
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
        """The pools that libraries have their workspaces in."""
        return () if self._workspaces is None else (self._workspaces,)

    def keep_workspaces(self, dtype: torch.dtype) -> None:
        """Let cuBLAS have its workspaces for this thread and stream in memory that is given to nothing else.

        They live in a table that anyone may clear, as compiled modules with graphs of their own do, and graphs captured
        before go on using them. So they come from a pool of their own, which is never released. The product that makes
        cuBLASLt take one is of the forward's dtype: kernels of another one would take 0.1 s to load.
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
