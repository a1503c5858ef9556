"""`GraphDevice`, the operations that captures and replays need of a device. `cuda` and `emulator` implement it.

An `Inventory` lists the memory that a captured graph touches, according to the driver: addresses, and their owners.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class MemoryKind(enum.Enum):
    """The owner of the memory at an address."""

    POOL = "memory of the graph's own pool"
    KNOWN = "memory that the graph's owner keeps alive"
    WORKSPACE = "a library's workspace"
    FOREIGN = "live memory without a known owner"
    OUTSIDE = "device memory that torch did not allocate"
    FREED = "memory that was given back"


class MemorySpan(NamedTuple):
    """A span of memory that is kept alive: start, end and name."""

    start: int
    end: int
    name: str


class Touch(NamedTuple):
    """An address among the parameters of a graph's node.

    Attributes:
        node: the name of the kernel, or of the node's other operation.
        address: the address; offset: its distance from the start of the block, or of the memory with a name.
        place: the owner of the memory; name: the name of the memory, if known.
        certain: False if the address is a word of a struct, which may be padding with any content.
        parameter: the index of the kernel's parameter; -1 if the node is no kernel.
        number: the index of the node.
    """

    node: str
    address: int
    offset: int
    place: MemoryKind
    name: str
    certain: bool
    parameter: int = -1
    number: int = 0


@dataclasses.dataclass
class Inventory:
    """The addresses in the nodes of one captured graph.

    Attributes:
        nodes: the number of nodes.
        touches: their touches, in order.
        notes: descriptions of unreadable parts, with their counts.
        seconds: the time of reading.
    """

    nodes: int = 0
    touches: list[Touch] = dataclasses.field(default_factory=list)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0

    def certain(self, place: MemoryKind) -> list[Touch]:
        """List the certain touches in this kind of memory."""
        return [touch for touch in self.touches if touch.place is place and touch.certain]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        touches = [{**touch._asdict(), "place": touch.place.name.lower()} for touch in self.touches]
        return {"nodes": self.nodes, "touches": touches, "notes": dict(self.notes), "seconds": self.seconds}


# Held during every capture: captures share a stream and the random generators, and garbage collection is paused for all
# threads. A pool's lock is always taken before it.
CAPTURE_LOCK = threading.RLock()


# While it holds anything, no launch is early, before its call is checked: naps, since memory may be gone, and who
# watches replays, since a discarded launch is none.
EARLY_LAUNCH_BLOCKERS: set[Any] = set()


@dataclasses.dataclass(eq=False)
class GraphPool:
    """Memory that several graphs share, which never run at the same time.

    Attributes:
        device: the device of the memory.
        handle: the device's own object for the pool.
        lock: held while a graph of this pool is captured or replayed.
        stream: the raw handle of the stream that used the pool last; another stream must wait for it.
        managers: the managers whose graphs use it, if a manager made it; it is released when none has graphs.
        watched: True if the next captures must be able to list memory left alive, which takes milliseconds in a large
            pool.
        shared: True if it was passed to a manager, so that others may use it.
    """

    device: GraphDevice
    handle: Any
    stream: int
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    managers: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    watched: bool = True
    shared: bool = False


class Mark(Protocol):
    """A point in a stream's work."""

    def ms_since(self, earlier: Any) -> float:
        """Return the milliseconds since an earlier mark of the device; waits until this mark is reached."""

    def wait(self) -> None:
        """Wait until the mark is reached."""


class Segment(Protocol):
    """One captured graph. A replay runs the recorded work again, at the recorded addresses."""

    @property
    def num_nodes(self) -> int | None:
        """The number of recorded operations; None if the device cannot tell."""

    def wait(self) -> None:
        """Wait until the graph can be replayed; raises an error if it cannot."""

    def replay(self) -> None:
        """Queue the recorded work on the current stream. Python does not run again."""

    def reset(self) -> None:
        """Drop the graph; it cannot be replayed afterwards."""


class GraphDevice(Protocol):
    """A device that captures work into graphs and replays it.

    A capture is ``begin``, work on the capture stream, ``end``. If the work fails, ``abandon`` restores stream, pool
    and random generators. A thread runs at most one capture at a time.

    Attributes:
        drawing_stream: the raw handle of the stream that last set the memory from which graphs read random states.
    """

    drawing_stream: int

    dtype: torch.dtype  # the dtype of matrix products in the next captures, for which libraries load kernels

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def emulated(self) -> bool:
        """True if graphs are emulated, with correct results but without speed."""

    def new_pool(self) -> GraphPool:
        """Make a pool that no graph uses yet."""

    def release_pool(self, pool: GraphPool) -> None:
        """Release the pool's memory as soon as no borrowed tensor is left. All its segments must have been reset."""

    def on_capture_stream(self) -> contextlib.AbstractContextManager[None]:
        """Make the process-wide capture stream current, ordered after and before the caller's stream."""

    def own_allocations(self) -> contextlib.AbstractContextManager[None]:
        """Let captures allocate from their own pool, even if the caller has set a memory pool for the thread."""

    def keep_workspaces(self) -> None:
        """Allocate libraries' workspaces for this thread and the current stream outside of the memory of captures."""

    def current_stream(self) -> int:
        """Return the current stream's raw handle."""

    def wait_for(self, stream: int) -> None:
        """Let the current stream wait for everything queued on `stream`, a raw handle, so far."""

    def is_capturing(self) -> bool:
        """True if the current stream is being captured, by this library or by other code."""

    def begin(self, pool: GraphPool, generators: Sequence[torch.Generator] = (), *, continues: bool = False) -> None:
        """Start to record the current thread's work into a new segment, instead of running it.

        Args:
            pool: the memory of tensors created from now on.
            generators: generators beside the default one that the work draws from.
            continues: this segment follows the pool's previous one in the same Program, so that every
                replay of it comes after a replay of that one. The emulator needs to know.
        """

    def recorded(self) -> tuple[int, int] | None:
        """Return the number of this thread's current capture, and the number of operations recorded so far.

        Returns:
            The two numbers; None without a capture, or if the device cannot tell.
        """

    def end(self) -> Segment | None:
        """Stop recording and return the segment; None if there is nothing to replay.

        Wait for it before its first replay.

        Raises:
            Exception: the recorded work broke a rule; call `abandon`.
        """

    def abandon(self) -> Exception | None:
        """Undo a capture that failed at any point since `begin`; does nothing without a capture.

        Returns:
            The error of the first broken rule, if the device knows it: TorchScript hides errors inside it.
        """

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def release_cached_memory(self) -> None:
        """Return the allocator's unused memory to the device."""

    def cache_releases(self) -> Hashable:
        """Return a value that changes when the allocator returns memory to the device; takes some 10 us on a GPU."""

    def mark(self) -> Mark:
        """Mark the current end of the current stream's work; fast, and does not wait."""

    def free_memory(self) -> int:
        """Return the free bytes of device memory."""

    def in_pool(self, pool: GraphPool, tensor: Tensor) -> bool:
        """True if a capture into `pool` allocated the memory of `tensor`."""

    def left_alive(self, pool: GraphPool) -> set[int]:
        """List the addresses of memory that captures of the last Program into `pool` made, and that is still owned.

        A current capture counts until it is abandoned. Borrowed tensors own nothing. Fast if there is no such memory.
        """

    def borrow(self, pool: GraphPool, tensor: Tensor) -> Tensor:
        """Return a tensor in the same memory that does not own it; `tensor` itself if that is impossible.

        Only for memory of a live pool that every replay writes before reading it: later captures may reuse the memory,
        and it is valid from one replay to the next. The result and its views keep the pool's memory allocated, so that
        it stays readable after graphs and pool are dropped.
        """


def order_draws(device: GraphDevice) -> None:
    """Let the current stream wait for the stream on which a drawing graph was last replayed, or a capture begun.

    Graphs that draw random numbers read a generator's seed and offset from memory that each of their replays, and each
    capture, sets. On two streams, two such graphs could read each other's values. Call it with CAPTURE_LOCK held.
    """
    stream = device.current_stream()
    if stream != device.drawing_stream:
        device.wait_for(device.drawing_stream)
        device.drawing_stream = stream
