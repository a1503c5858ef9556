"""Capture and replay on a GPU, through `torch.cuda.CUDAGraph`."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.errors import ConfigError
from simplegraph.base.extras import graph_pool_id, wait_before_captures
from simplegraph.device.cuda import forks
from simplegraph.device.cuda.allocator import Allocations, owned_addresses, segments
from simplegraph.device.cuda.driver import captured_nodes, captured_so_far, new_stream, unjoined_operations
from simplegraph.device.cuda.graph import CudaPool, CudaSegment, OwnedGraph, graveyard
from simplegraph.device.protocol import CAPTURE_LOCK, GraphPool, order_draws

logger = logging.getLogger("simplegraph")

_MAX_RELEASED = 32 << 20  # the most bytes of released pools that the allocator may keep


class _Capture(NamedTuple):
    graph: torch.cuda.CUDAGraph
    pool: CudaPool
    generators: Sequence[torch.Generator]


class CudaMark(NamedTuple):
    """A recorded event."""

    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def ms_since(self, earlier: CudaMark) -> float:
        self.wait()
        return float(earlier.event.elapsed_time(self.event))


class CudaDevice:
    """The `GraphDevice` protocol on one CUDA device.

    Captures use the error mode ``thread_local``, so that other threads can use the device meanwhile. All captures of
    the process use one stream, since cuBLAS workspaces and allocator blocks belong to a stream.

    Attributes:
        allocations: directs allocations, and knows the pools of libraries' workspaces.
        former: ranges that the allocator had at earlier inventories.
    """

    emulated = False
    dtype = torch.bfloat16

    def __init__(self, index: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("no CUDA device is available; use CPU tensors to run on the emulator.")
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise ConfigError(
                f"torch's CUDA allocator is {backend}, but graphs need the native one; see PYTORCH_CUDA_ALLOC_CONF."
            )
        self.index, self.torch_device = index, torch.device("cuda", index)
        self._stream = _own_stream(self.torch_device)
        self._lasting = {0, self._stream.cuda_stream}  # raw handles of streams that are never destroyed
        self.drawing_stream = 0
        self.allocations = Allocations(self.torch_device)
        self.former: set[tuple[int, int]] = set()
        self._released = 0  # bytes of released pools that the allocator may still hold
        self._thread = threading.local()
        # On the path of every replay, so without a Python frame of their own.
        self.current_stream = functools.partial(torch._C._cuda_getCurrentRawStream, index)
        self.is_capturing = torch._C._cuda_isCurrentStreamCapturing

    def new_pool(self) -> GraphPool:
        wait_before_captures()
        handle = CudaPool((0, 0))
        if self._released > _MAX_RELEASED:
            self.release_cached_memory()
        with self._on_own_stream():
            self._refresh(handle)
        return GraphPool(self, handle, self.current_stream())

    @functools.cached_property
    def _scratch(self) -> Tensor:
        """The scratch element that an empty graph writes to, since torch warns about empty graphs."""
        with torch.inference_mode(False):  # else it could only be written in that mode
            return torch.zeros(1, device=self.torch_device)

    def _refresh(self, handle: CudaPool, generators: Sequence[torch.Generator] = ()) -> None:
        """Use a new pool of the allocator for captures from now on."""
        graveyard.clear()
        cell = self._scratch
        pool_id = handle.id = graph_pool_id(self, torch.cuda.graph_pool_handle)
        order_draws(self)
        anchor = torch.cuda.CUDAGraph()
        handle.anchors[handle.id] = OwnedGraph(anchor)
        for generator in generators:
            anchor.register_generator_state(generator)
        anchor.capture_begin(pool=pool_id, capture_error_mode="thread_local")
        try:
            cell.zero_()
        finally:
            anchor.capture_end()

    def release_pool(self, pool: GraphPool) -> None:
        # The allocator keeps the memory until its cache is emptied; later captures cannot use it.
        self._released += sum(segment["total_size"] for segment in segments(pool.handle.anchors))
        pool.handle.anchors.clear()  # each ends with the last tensor that was borrowed from its pool

    def keep_workspaces(self) -> None:
        self.allocations.keep_workspaces(self.dtype)

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        with self._on_own_stream() as entered:
            if entered:
                self.keep_workspaces()
            yield

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[bool]:
        """Make the capture stream current; yields True if it was not current before."""
        # With the lock: work of another thread on this stream would become part of a capture.
        with CAPTURE_LOCK, torch.cuda.device(self.torch_device):
            caller = torch.cuda.current_stream()
            if caller == self._stream:
                yield False
                return
            self._note_lasting(caller)
            self._stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self._stream):
                    yield True
            finally:
                caller.wait_stream(self._stream)

    def own_allocations(self) -> contextlib.AbstractContextManager[None]:
        return self.allocations.in_captures()

    def wait_for(self, stream: int) -> None:
        current = torch.cuda.current_stream(self.torch_device)
        self._note_lasting(current)
        if stream not in self._lasting:
            self.synchronize()  # its owner may have destroyed it, though not its work
            return
        # The default stream cannot be made from a handle.
        other = _external_stream(stream, device=self.torch_device) if stream else torch.cuda.default_stream(self.index)
        current.wait_stream(other)

    def _note_lasting(self, stream: torch.cuda.Stream) -> None:
        """Note a stream of torch, which is never destroyed; streams of other libraries have their handle as id."""
        if stream.stream_id != stream.cuda_stream:
            self._lasting.add(stream.cuda_stream)

    def begin(self, pool: GraphPool, generators: Sequence[torch.Generator] = (), *, continues: bool = False) -> None:
        graveyard.clear()
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # the end of its capture leaves it to be instantiated
        for generator in generators:
            graph.register_generator_state(generator)
        self._thread.capture = _Capture(graph, pool.handle, generators)
        if not continues:
            pool.handle.addresses.forget_others()
        if not continues and pool.watched:
            pool.handle.owned_before = self._owned_blocks(pool.handle)
        order_draws(self)
        forks.start(self.current_stream())
        with torch._C._DisableTorchDispatch():  # torch sets its generators' tensors, which is no work of the forward
            graph.capture_begin(pool=pool.handle.id, capture_error_mode="thread_local")

    def recorded(self) -> tuple[int, int] | None:
        return captured_so_far(self.current_stream())

    def end(self) -> CudaSegment | None:
        capture: _Capture = self._thread.capture
        num_nodes = captured_nodes(self.current_stream())
        try:
            with torch._C._DisableTorchDispatch():
                if num_nodes == 0:
                    self._scratch.zero_()
                if torch.distributed.is_available() and torch.distributed.is_initialized():
                    _refuse_unjoined(unjoined_operations(self.current_stream()))
                capture.graph.capture_end()
        except RuntimeError as error:
            raise forks.explained(error) from None  # whose text it has
        forks.stop()
        self._thread.capture = None
        capture.pool.addresses.forget_others()
        if num_nodes == 0:
            OwnedGraph(capture.graph).reset()
            return None
        return CudaSegment(capture.graph, capture.pool, num_nodes, self.torch_device)

    def abandon(self) -> None:
        """End and drop the current capture; CUDA's own messages name the broken rule."""
        capture: _Capture | None = getattr(self._thread, "capture", None)
        if capture is None:
            return
        self._thread.capture = None
        forks.stop()
        with torch.cuda.stream(self._stream):  # wherever the work that failed has left us
            try:
                capture.graph.capture_end()
            except RuntimeError:
                self._repair(capture)

    def _repair(self, capture: _Capture) -> None:
        """Restore the allocator and the generators after ``capture_end`` itself raised (torch 2.9 to 2.11)."""
        # The allocator still directs this thread's allocations to the pool, and the pool still counts the capture.
        # If the capture never began, the calls raise an error.
        try:
            torch._C._cuda_endAllocateToPool(self.index, capture.pool.id)
            torch._C._cuda_releasePool(self.index, capture.pool.id)
        except RuntimeError as error:
            logger.debug("nothing to take back from the allocator: %s", error)
        # The pool reports "already recording" from now on, so a new pool is used. The graphs in the old one stay valid.
        # The generators still count as captured, until the end of the new pool's first capture. (New state objects
        # would mend that, too, but graphs that draw random numbers refer to the old ones.)
        broken = capture.pool.id
        self._refresh(capture.pool, capture.generators)
        capture.pool.retire(broken)

    def synchronize(self) -> None:
        with CAPTURE_LOCK:  # illegal while any thread captures
            torch.cuda.synchronize(self.torch_device)

    def release_cached_memory(self) -> None:
        try:
            torch.cuda.empty_cache()
            self._released = 0
        except RuntimeError as error:  # another thread captures by itself, or allocates from a pool of its own
            logger.debug("the allocator keeps its cache: %s", error)

    def cache_releases(self) -> tuple[int, int, int]:
        reserved = torch._C._cuda_memoryStats(self.index)["reserved_bytes"]["all"]
        # All three, since a program may set the counts of bytes back to 0.
        return reserved["freed"], reserved["allocated"], reserved["current"]

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return CudaMark(event)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def in_pool(self, pool: GraphPool, tensor: Tensor) -> bool:
        handle, address = pool.handle, tensor.data_ptr()
        return bool(address) and handle.addresses.find(address, handle.anchors)

    def left_alive(self, pool: GraphPool) -> set[int]:
        handle: CudaPool = pool.handle
        return self._owned_blocks(handle) - handle.owned_before

    def _owned_blocks(self, handle: CudaPool) -> set[int]:
        """List the addresses of the pool's blocks that are in use."""
        if not (_CAN_COMPARE and torch._C._cuda_checkPoolLiveAllocations(self.index, handle.id, handle.owned)):
            handle.owned = owned_addresses(handle.id)
        return handle.owned

    def borrow(self, pool: GraphPool, tensor: Tensor) -> Tensor:
        if not _CAN_BORROW or tensor.is_conj() or tensor.is_neg():  # lazy bits that metadata does not carry
            return tensor
        storage, device = tensor.untyped_storage(), tensor.device
        address, nbytes = storage.data_ptr(), storage.nbytes()
        borrowed: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        # Attributes of a storage live as long as the memory: views of the tensor keep the anchors alive, too.
        borrowed.anchors = tuple(pool.handle.anchors.values())
        metadata = {
            "nbytes": nbytes,
            "data_ptr": address,
            "size": tensor.shape,
            "stride": tensor.stride(),
            "dtype": tensor.dtype,
            "device": device,
            "storage_offset": tensor.storage_offset(),
        }
        result: Tensor = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, borrowed)
        return result


# Typed loosely because torch leaves it untyped.
_external_stream: Callable[..., torch.cuda.Stream] = torch.cuda.ExternalStream
_torch_stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """Make a separate stream by the driver, or by torch if there is no driver.

    Torch has 32 streams and returns them in turn: other code's work on the same stream would become part of a capture.
    """
    with torch.cuda.device(device):
        torch.cuda.mem_get_info(device)  # makes the context, if this is the process's first use of the device
        handle = new_stream()
    return _torch_stream(device) if handle is None else _external_stream(handle, device=device)


def _refuse_unjoined(operations: int) -> None:
    """Raise an error if work is not joined. CUDA raises it itself, except for NCCL's collectives."""
    if operations:
        raise RuntimeError(
            f"unjoined work: {operations} operations on other streams, such as a collective with async_op=True whose "
            "work nobody waited for"
        )


# Private to torch. Without them, memory is owned instead of borrowed.
_CAN_BORROW = hasattr(torch._C, "_construct_storage_from_data_pointer") and hasattr(
    torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata"
)
_CAN_COMPARE = hasattr(torch._C, "_cuda_checkPoolLiveAllocations")  # as torch's own graph trees do


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Return the one `CudaDevice` of a CUDA device, made at its first use."""
    return CudaDevice(index)
