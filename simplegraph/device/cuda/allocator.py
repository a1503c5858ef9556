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
# Private to torch. Without them, allocations are not diverted.
_CAN_DIVERT = all(
    hasattr(torch._C, f"_cuda_{name}")
    for name in ("beginAllocateCurrentThreadToPool", "endAllocateToPool", "releasePool")
)


def segments(pool_ids: Container[PoolId] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the allocator's description of the memory of some pools, of all if None."""
    # Of all pools: asked for one by id, torch 2.11 left the interpreter's heap corrupted after some hundred
    # pools (later crashes anywhere, as if the id's numbers had lost a reference).
    snapshot: list[dict[str, Any]] = torch.cuda.memory.memory_snapshot()  # type: ignore[no-untyped-call]
    return (segment for segment in snapshot if pool_ids is None or tuple(segment["segment_pool_id"]) in pool_ids)


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
        """Forget memory outside the pools: it may be freed, and allocated to the pools next."""
        self._ranges = [span for span in self._ranges if span[2]]
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

        Otherwise that pool would come first: the graph's memory would lie in it, and be handed to others after the
        capture.
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
        """Put cuBLAS's workspaces for this thread and stream into memory that is given to nothing else.

        Torch keeps them in a table that anyone may clear, as compiled modules with graphs of their own do, while graphs
        captured before still use them. So they come from a separate pool, which is never released. The product that
        makes cuBLASLt allocate its workspace has the forward's dtype: kernels of another dtype would take 0.1 s to
        load.
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
