"""Regions on a GPU: CUDA's virtual memory, whose addresses outlive its pages, in pools of torch's allocator."""

from __future__ import annotations

import ctypes
import functools
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from simplegraph.base.errors import ConfigError
from simplegraph.device.cuda.allocator import segments
from simplegraph.device.cuda.driver import cuda_driver
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.sleeping.regions import MemoryRegion, Segments, Span

_DEVICE, _READ_WRITE = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RESERVED: dict[int, int] = {}  # address that is reserved for torch's allocator -> bytes


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _map(address: int, size: int, index: int) -> int:
    """Map new pages to addresses; return the driver's error code, 0 for success."""
    driver, handle, location = cuda_driver(), ctypes.c_uint64(), _Location(_DEVICE, index)
    pages, access = _Properties(kind=1, location=location), _Access(location, _READ_WRITE)
    at, count = ctypes.c_uint64(address), ctypes.c_size_t(size)
    error: int = driver.cuMemCreate(ctypes.byref(handle), count, ctypes.byref(pages), ctypes.c_uint64(0))
    if error:
        return error
    error = driver.cuMemMap(at, count, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    if not error:
        error = driver.cuMemSetAccess(at, count, ctypes.byref(access), ctypes.c_size_t(1))
        if error:
            _unmap(address, size)
    driver.cuMemRelease(handle)  # the mapping keeps the pages
    return error


def _unmap(address: int, size: int) -> None:
    cuda_driver().cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size))


def _release(address: int) -> None:
    cuda_driver().cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(_RESERVED.pop(address)))


def _allocate(size: int, index: int, _: int) -> int | None:
    """Allocate memory at reserved addresses for torch's allocator; None if there is none, so that torch raises."""
    address, zero = ctypes.c_uint64(), ctypes.c_uint64(0)
    if cuda_driver().cuMemAddressReserve(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), zero, zero):
        return None
    _RESERVED[address.value] = size
    if _map(address.value, size, index):
        _release(address.value)
        return None
    return address.value


# It lives as long as torch may call it.
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(_allocate)


@functools.cache
def _allocator() -> Any:
    """Make the allocator of pools.

    Its callback takes the interpreter's lock. Torch's allocator must not hold its own lock meanwhile, since a thread
    that frees a tensor holds the interpreter's lock and waits for the allocator's.
    """
    driver = cuda_driver()
    if driver is None or not hasattr(torch._C, "_cuda_customAllocator"):
        raise ConfigError("this driver, or this torch, has no virtual memory for pools of torch's allocator.")
    before = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")
    options = ",".join([*filter(None, [before]), "release_lock_on_cudamalloc:True"])
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # since torch 2.10
    (configure or torch.cuda.memory._set_allocator_settings)(options)
    # The driver's own function unmaps pages; it needs no lock and does not wait: see `close`.
    allocate, free = (ctypes.cast(function, ctypes.c_void_p).value for function in (_CALLBACK, driver.cuMemUnmap))
    return torch._C._cuda_customAllocator(allocate or 0, free or 0)


class CudaRegion(MemoryRegion):
    """The memory of one pool of torch's allocator, which releases none of it by itself while the region is open."""

    def __init__(self, part: str, device: GraphDevice) -> None:
        super().__init__(part, device)
        self._index: int = device.torch_device.index or 0
        with torch.cuda.device(self._index):
            self._pool = torch.cuda.MemPool(_allocator())
        # Never destroyed: this would end the process if other code captures or uses a pool at that moment.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._pool))
        self.pool_id: tuple[int, int] = self._pool.id

    def _allocator(self) -> AbstractContextManager[object]:
        return torch.cuda.use_mem_pool(self._pool, self._index)

    def look(self, present: Segments) -> None:
        own = {segment["address"]: segment for segment in present.get(self.pool_id, ())}
        self.blocks = [Span(at, _RESERVED[at]) for at in own if at in _RESERVED]
        self.live = []
        for address, segment in own.items():
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    self.live.append(Span(address, block["size"]))
                address += block["size"]

    def holds_graphs(self, pool: GraphPool) -> bool:
        return pool.device is self.device and self.pool_id in pool.handle.anchors

    @property
    def unused(self) -> bool:
        return bool(self.blocks) and not self.live and self._pool.use_count() == 1  # graphs count, too

    def close(self) -> None:
        torch._C._cuda_releasePool(self._index, self.pool_id)
        self.device.release_cached_memory()
        left = {segment["address"] for segment in segments((self.pool_id,))}
        for block in self.blocks:
            if block.address not in left:  # else torch unmaps it later
                _release(block.address)

    def copy_out(self, host: int, span: Span) -> None:
        self._queue("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(host), ctypes.c_uint64(span.address), span.size)

    def copy_in(self, host: int, span: Span) -> None:
        self._queue("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(span.address), ctypes.c_void_p(host), span.size)

    def fill(self, span: Span, byte: int) -> None:
        self._queue("cuMemsetD8Async", ctypes.c_uint64(span.address), ctypes.c_ubyte(byte), span.size)

    def _queue(self, function: str, target: Any, source: Any, size: int) -> None:
        stream = ctypes.c_void_p(self.device.current_stream())
        with torch.cuda.device(self._index):  # whose default stream it may be
            error = getattr(cuda_driver(), function)(target, source, ctypes.c_size_t(size), stream)
        if error:
            raise RuntimeError(f"CUDA error {error} in {function} of {size} bytes")

    def unmap(self, block: Span) -> None:
        _unmap(*block)

    def map(self, block: Span) -> bool:
        return not _map(*block, self._index)
