"""The `GraphDevice` protocol on CPU tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, overrides
from torch.optim import Optimizer
from torch.utils import _python_dispatch

from simplegraph.base import patches
from simplegraph.base.errors import EmulatorError
from simplegraph.device.emulator.arena import (
    DEFAULT_STREAM,
    Arena,
    EmulatedThread,
    EmulatorSegment,
    Memory,
    MemoryView,
    Streams,
)
from simplegraph.device.emulator.capture import EmulatedCapture
from simplegraph.device.emulator.rules import COMPILED
from simplegraph.device.protocol import GraphPool

_functions: Any = overrides  # typed loosely because torch leaves it untyped

CAPTURE_STREAM = 1

_TOTAL_BYTES = 16 << 30  # the memory of the emulated device


class EmulatorMark(NamedTuple):
    """A point in time; the emulator has no queued work."""

    seconds: float

    def wait(self) -> None:
        """Do nothing: the mark is reached already."""

    def ms_since(self, earlier: EmulatorMark) -> float:
        return (self.seconds - earlier.seconds) * 1e3


_TORCH_IS_CAPTURING = torch.cuda.is_current_stream_capturing
_TORCH_IS_OVERRIDDEN = overrides.has_torch_function
_HEALTH_CHECKS = [name for name in vars(Optimizer) if name.endswith("_graph_capture_health_check")]


class EmulatorDevice:
    """The `GraphDevice` protocol on CPU tensors. Use the one that `emulator()` returns.

    Beside the protocol it has the method `stream`, and counters for tests:

    Attributes:
        synchronizations: the number of calls of `synchronize`.
        waits: the last (stream, awaited stream) pairs.
    """

    emulated = True
    dtype = torch.float32
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.synchronizations = 0
        self._cache_releases = 0
        self.drawing_stream = DEFAULT_STREAM
        self._thread = EmulatedThread()
        # On the path of every replay, so without a Python frame of their own, as on a GPU.
        self.current_stream = functools.partial(getattr, self._thread, "stream")
        self.is_capturing = functools.partial(getattr, self._thread, "is_recording")
        self._streams = Streams()
        self.waits = self._streams.waits
        self._memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._sizes: dict[int, int] = {}

    def new_pool(self) -> GraphPool:
        return GraphPool(self, Arena(self._memories, self._sizes, self._streams, self._thread), self.current_stream())

    def release_pool(self, pool: GraphPool) -> None:
        """Release the pool's memory.

        Raises:
            EmulatorError: a segment in it was not reset.
        """
        arena: Arena = pool.handle
        if arena.segments or arena.capturing:
            raise EmulatorError(f"the pool still has {arena.segments} graphs; reset them before releasing it.")
        arena.released = True
        arena.free()

    @contextlib.contextmanager
    def stream(self, stream: int) -> Iterator[None]:
        """Make an emulated stream current in this thread; any whole number is the name of a stream."""
        caller, self._thread.stream = self._thread.stream, stream
        try:
            yield
        finally:
            self._thread.stream = caller

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        caller = self.current_stream()
        if caller == CAPTURE_STREAM:
            yield
            return
        with self.stream(CAPTURE_STREAM):
            self.wait_for(caller)
            try:
                yield
            finally:
                self._streams.wait(caller, CAPTURE_STREAM)

    def own_allocations(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def keep_workspaces(self) -> None:
        """Do nothing: no library has workspaces."""

    def wait_for(self, stream: int) -> None:
        if stream != self.current_stream():
            self._thread.refuse_in_capture("the capture stream waited for work that is not captured")
        self._streams.wait(self.current_stream(), stream)

    def begin(self, pool: GraphPool, generators: Sequence[torch.Generator] = (), *, continues: bool = False) -> None:
        """Start recording.

        Raises:
            EmulatorError: this thread or the pool is recording already, the pool was released, or the
                default stream is current.
        """
        self._thread.refuse_in_capture("a capture was begun inside another")
        if self.current_stream() == DEFAULT_STREAM:
            raise EmulatorError("the default stream cannot be captured; begin inside on_capture_stream().")
        self._thread.recording = EmulatedCapture(pool.handle, self.current_stream(), generators, continues=continues)
        self._thread.is_recording = True
        # Libraries ask this to avoid work that a capture does not permit, which they must do here as on a GPU.
        replacing: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (torch.cuda, "is_current_stream_capturing", lambda _: self._any_capturing),
            (overrides, "has_torch_function", lambda _: self._overridden),
            (torch, "get_rng_state", lambda _: self._rng_state),
        ]
        # The kernels of compiled code bypass the dispatcher. The module is loaded only once something was compiled.
        compiled: Any = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        replacing += [(compiled, "__call__", self._refusing)] if compiled is not None else []
        # On a machine with a GPU, some releases of torch check optimizers of CPU tensors for `capturable`, too.
        replacing += [(Optimizer, name, lambda _: lambda _: None) for name in _HEALTH_CHECKS]
        for owner, name, make in replacing:
            patches.replace(owner, name, make)
        self._thread.replaced = [(owner, name) for owner, name, _ in replacing]

    def _end_recording(self) -> None:
        self._thread.recording, self._thread.is_recording = None, False
        for owner, name in self._thread.replaced:
            patches.restore(owner, name)

    def _refusing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any, **kwargs: Any) -> Any:
            if self._thread.recording is not None:
                self._thread.recording.fail(COMPILED)
            return call(*args, **kwargs)

        return refusing

    def _any_capturing(self) -> bool:
        return self.is_capturing() or _TORCH_IS_CAPTURING()

    def _rng_state(self) -> Tensor:
        self._thread.refuse_in_capture("the state of a random generator was read in a capture")
        return torch.default_generator.get_state()

    def _overridden(self, args: Iterable[Any]) -> bool:
        """Ignore the capture's function mode, which a GPU does not have: torch.nn's attention then has a fast path."""
        alone = self.is_capturing() and torch._C._len_torch_function_stack() == 1
        with _functions._pop_mode_temporarily() if alone else contextlib.nullcontext():
            return _TORCH_IS_OVERRIDDEN(args)

    def end(self) -> EmulatorSegment | None:
        """Stop recording and return the segment; None for an empty segment that is not the first of its Program.

        Raises:
            EmulatorError: the capture was broken, or reseeded a generator, or ends on another stream.
        """
        recording = self._thread.recording
        if recording is None:
            raise EmulatorError("no capture is under way; call begin() first.")
        recording.stop()
        if recording.stream != self.current_stream():
            raise EmulatorError("a capture must end on the stream that it began on.")
        segment: EmulatorSegment | None = recording.finish()
        self._end_recording()
        return segment

    def recorded(self) -> tuple[int, int] | None:
        recording = self._thread.recording
        return None if recording is None else (id(recording), len(recording.calls))

    def abandon(self) -> EmulatorError | None:
        recording = self._thread.recording
        if recording is None:
            return None
        self._end_recording()
        recording.stop()
        recording.undo()
        broken: EmulatorError | None = recording.broken
        return broken

    def synchronize(self) -> None:
        self._thread.refuse_in_capture("the device was synchronised, which a capture does not permit")
        self.synchronizations += 1
        self._streams.done = self._streams.ticks.copy()

    def release_cached_memory(self) -> None:
        self._cache_releases += 1

    def cache_releases(self) -> int:
        """Return the number of calls of `release_cached_memory`."""
        return self._cache_releases

    def mark(self) -> EmulatorMark:
        return EmulatorMark(time.perf_counter())

    def free_memory(self) -> int:
        """Count exactly, as on a separate device, so that tests see the memory of a capture."""
        return _TOTAL_BYTES - sum(self._sizes.values())

    def in_pool(self, pool: GraphPool, tensor: Tensor) -> bool:
        memory = self._captured(tensor)
        return memory is not None and memory.pool is pool.handle

    def left_alive(self, pool: GraphPool) -> set[int]:
        arena: Arena = pool.handle
        recording = self._thread.recording
        begun = recording.left_alive() if recording is not None and recording.arena is arena else set()
        return begun | {memory.address for memory in arena.of_group(reusable=False)}

    def borrow(self, pool: GraphPool, tensor: Tensor) -> Tensor:
        memory = self._captured(tensor)
        if memory is None:
            return tensor
        with _python_dispatch._disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            # An alias that keeps the memory allocated, though the pool may reuse it. Its address is not final.
            address, nbytes = memory.storage.data_ptr(), memory.storage.nbytes()
            storage: Any = torch._C._construct_storage_from_data_pointer(address, self.torch_device, nbytes)
            storage.memory = memory  # a storage keeps its attributes, whatever becomes of the Python object
            return MemoryView.of(tensor, memory).tensor(storage)

    def _captured(self, tensor: Tensor) -> Memory | None:
        """Find the captured memory of a tensor, owning or borrowed; also memory of the current capture."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return None
        address = tensor.untyped_storage().data_ptr()
        if not address:
            return None
        recording = self._thread.recording
        made: Memory | None = recording.made(tensor) if recording is not None else None
        return made or self._memories.get(address)


@functools.cache
def emulator() -> EmulatorDevice:
    """Return the emulator of this process, made at its first use, so that all wrappers share its streams."""
    return EmulatorDevice()
