"""Define what capture and replay need of a device. `cuda` and `emulator` implement it.

A device also tells what memory a captured graph touches, as its driver has it: addresses, and whose they are.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class MemoryKind(enum.Enum):
    """Whose memory an address is in."""

    POOL = "memory of the graph's own pool"
    KNOWN = "memory that the graph's owner keeps alive"
    WORKSPACE = "a library's workspace"
    FOREIGN = "live memory that nobody accounts for"
    OUTSIDE = "device memory that torch did not allocate"
    FREED = "memory that was given back"


class MemorySpan(NamedTuple):
    """A span of memory that is kept alive: its start, its end and its name."""

    start: int
    end: int
    name: str


class Touch(NamedTuple):
    """An address that a node of a graph has.

    Attributes:
        node: the kernel's name, or what else it does.
        address: the address; offset: from the start of the block, or of the known memory, that it is in.
        place: whose memory that is; name: its name, if it is known.
        certain: False if the address is a word of a struct, which may be padding that holds anything.
        parameter: which of the kernel's has the address; -1 if the node is no kernel.
        number: the node's place among the nodes.
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
        nodes: how many nodes there are.
        touches: what they touch, in their order.
        notes: what could not be read, and how often.
        seconds: the time that reading took.
    """

    nodes: int = 0
    touches: list[Touch] = dataclasses.field(default_factory=list)
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0

    def certain(self, place: MemoryKind) -> list[Touch]:
        """List the addresses in this place that are no padding."""
        return [touch for touch in self.touches if touch.place is place and touch.certain]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        touches = [{**touch._asdict(), "place": touch.place.name.lower()} for touch in self.touches]
        return {"nodes": self.nodes, "touches": touches, "notes": dict(self.notes), "seconds": self.seconds}


# Held during every capture: captures share a stream and the random generators, and gc is paused for all
# threads. A pool's lock is taken before it, never after.
CAPTURE_LOCK = threading.RLock()


@dataclasses.dataclass(eq=False)
class GraphPool:
    """Memory that several graphs share, because never two of them run at once.

    Attributes:
        device: the device it belongs to.
        handle: what the device knows it by.
        lock: held while a graph of this pool is captured or replayed.
        stream: the stream that used the pool last, as a raw handle. Another stream must wait for it.
        managers: those whose graphs live in it, where a manager made it; it is released when none has any.
        watched: True to list what the next captures leave alive, which takes milliseconds in a large pool.
    """

    device: GraphDevice
    handle: Any
    stream: int
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)
    managers: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)
    watched: bool = True


class Mark(Protocol):
    """A point in a stream's work."""

    def ms_since(self, earlier: Any) -> float:
        """Milliseconds between two marks of one device; waits until this one is reached."""

    def wait(self) -> None:
        """Wait until it is reached."""


class Segment(Protocol):
    """One captured graph. Replaying it runs the recorded work again, at the recorded addresses."""

    @property
    def num_nodes(self) -> int | None:
        """Operations recorded, or None where the device cannot say."""

    def wait(self) -> None:
        """Wait until it can be replayed, which may take a moment after its capture; raise what is in the way."""

    def replay(self) -> None:
        """Queue the recorded work on the current stream. Python does not run again."""

    def reset(self) -> None:
        """Drop the graph; it cannot be replayed afterwards."""


class GraphDevice(Protocol):
    """A place where work can be captured into graphs and replayed.

    A capture is ``begin``, work on the capture stream, ``end``; or, when the work failed, ``abandon``,
    which puts stream, pool and random generators back. At most one capture runs in a thread.

    Attributes:
        drawing_stream: the stream, as a raw handle, that set the memory which graphs read random states from last.
    """

    drawing_stream: int

    dtype: torch.dtype  # of the products in what is captured next: libraries load kernels for each

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def emulated(self) -> bool:
        """True where graphs are imitated: right answers, no speed."""

    def new_pool(self) -> GraphPool:
        """Make a pool that no graph uses yet."""

    def release_pool(self, pool: GraphPool) -> None:
        """Give the pool's memory back, once no borrowed tensor is left. Every segment in it must have been reset."""

    def on_capture_stream(self) -> contextlib.AbstractContextManager[None]:
        """Make the process-wide capture stream current, ordered after and before the caller's stream."""

    def own_allocations(self) -> contextlib.AbstractContextManager[None]:
        """Let captures allocate from their own pool, whatever memory pool the caller has set for the thread."""

    def keep_workspaces(self) -> None:
        """Let libraries have their workspaces for this thread and the current stream outside of captures' memory."""

    def current_stream(self) -> int:
        """Return the current stream's raw handle."""

    def wait_for(self, stream: int) -> None:
        """Let the current stream wait for everything queued on `stream`, a raw handle, so far."""

    def is_capturing(self) -> bool:
        """True if the current stream is being captured, by this library or by anyone else."""

    def begin(self, pool: GraphPool, generators: Sequence[torch.Generator] = (), *, continues: bool = False) -> None:
        """Start recording the current thread's work into a new segment instead of running it.

        Args:
            pool: where tensors created from now on live.
            generators: generators beside the default one that the work draws from.
            continues: this segment follows the pool's previous one in the same Program, so that every
                replay of it comes after a replay of that one. The emulator needs to know.
        """

    def recorded(self) -> tuple[int, int] | None:
        """Return the number of the capture under way in this thread, and how many operations it has recorded so far.

        Returns:
            None if none is under way, or the device cannot say.
        """

    def end(self) -> Segment | None:
        """Stop recording and return what was recorded; None where that is nothing to replay.

        Wait for it before its first replay.

        Raises:
            Exception: the recorded work broke a rule; call `abandon`.
        """

    def abandon(self) -> Exception | None:
        """Undo a capture that failed at any point since `begin`; harmless when none is under way.

        Returns:
            The rule that was broken first, if the device knows: TorchScript conceals what went wrong inside of it.
        """

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def release_cached_memory(self) -> None:
        """Return the allocator's unused memory to the device."""

    def mark(self) -> Mark:
        """Note how far the current stream's work is; cheap, and waits for nothing."""

    def free_memory(self) -> int:
        """Return the free bytes of device memory."""

    def in_pool(self, pool: GraphPool, tensor: Tensor) -> bool:
        """True if a capture into `pool` allocated the memory of `tensor`."""

    def left_alive(self, pool: GraphPool) -> set[int]:
        """List the addresses of memory that the last Program's captures into `pool` made and that something still owns.

        One under way counts, until it is abandoned. Borrowed tensors own nothing. Cheap where there is none.
        """

    def borrow(self, pool: GraphPool, tensor: Tensor) -> Tensor:
        """Return the same memory without owning it, or `tensor` itself where that is impossible.

        Only for memory of a live pool that every replay writes before it is read: later captures may then
        reuse it, and it is valid from one replay to the next. The result and its views keep the pool's memory
        from being given back, so that it stays readable when graphs and pool are dropped.
        """


def order_draws(device: GraphDevice) -> None:
    """Let the current stream wait for the one on which a graph that draws was replayed last, or a capture begun.

    Such graphs read seed and offset of a generator from memory that each of their replays, and each capture, sets: two
    of them on two streams would read each other's. Call with CAPTURE_LOCK held.
    """
    stream = device.current_stream()
    if stream != device.drawing_stream:
        device.wait_for(device.drawing_stream)
        device.drawing_stream = stream
