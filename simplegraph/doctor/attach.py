"""Attach to all graphs that any code of this process captures, and read their nodes.

On a GPU this uses torch's hooks for all graphs (2.15 and later), or replaces the public methods of
`torch.cuda.CUDAGraph` until the end. On the emulator it uses segments.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import importlib
import inspect
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from simplegraph.base import patches
from simplegraph.base.collection import without_collections
from simplegraph.base.errors import ConfigError
from simplegraph.device.cuda import allocator
from simplegraph.device.cuda.driver import cuda_driver
from simplegraph.device.cuda.inventory.nodes import (
    KernelFunction,
    NodeReader,
    Piece,
    ProcessMemory,
    joined,
    places_of,
)
from simplegraph.device.cuda.inventory.places import device_memory
from simplegraph.device.protocol import EARLY_LAUNCH_BLOCKERS

_ADDRESSES = 1 << 32, 1 << 48  # words outside of this range are no addresses of a device
_GRAPH = ("GetNodes", "NodeGetType", "KernelNodeGetParams_v2", "MemcpyNodeGetParams", "MemsetNodeGetParams", "Clone")
_OTHERS = ("cuGraphDestroy", "cuStreamGetCaptureInfo_v2", "cuFuncGetParamInfo", "cuPointerGetAttribute")
_CALLS = (*(f"cuGraph{name}" for name in _GRAPH), *_OTHERS)


class Node(NamedTuple):
    """One node of a graph.

    Attributes:
        name: the name of a kernel in the driver, or of the node's other operation; shape: grid and block of a launch.
        addresses: its certain addresses; words: words of structs, which may be addresses, or padding with any content.
    """

    name: str
    shape: str
    addresses: Sequence[int]
    words: Sequence[int] = ()


@dataclasses.dataclass
class CaptureReading:
    """The nodes and addresses that a capture recorded.

    Attributes:
        parse: returns the nodes, in the driver's order; called later, so that the capture need not wait.
        notes: descriptions of unreadable parts, with their counts; known with the nodes.
        unread: the first node whose parameters could not be read; -1 if there is none, and before the nodes are known.
        seconds: the time that the capture waited.
    """

    parse: Callable[[], Sequence[Node]] = tuple
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    unread: int = -1
    seconds: float = 0.0

    @functools.cached_property
    def nodes(self) -> Sequence[Node]:
        """Return the nodes."""
        nodes, self.parse = self.parse(), tuple
        return nodes


class Watcher(Protocol):
    """Receives the events of every graph of the process. A graph is identified by its object."""

    def capture_begins(self, graph: Any) -> None: ...

    def capture_ended(self, graph: Any, reading: CaptureReading) -> None: ...

    def replay_begins(self, graph: Any) -> None: ...

    def replay_ended(self, graph: Any) -> None: ...

    def graph_dropped(self, key: int) -> None: ...


class CudaGraphs:
    """Shows a watcher every `torch.cuda.CUDAGraph` of this process.

    Attributes:
        span: the lowest and the highest address for words of parameters.

    Raises:
        ConfigError: the driver lacks a call that reading graphs needs.
    """

    device = "cuda"

    def __init__(self, watcher: Watcher) -> None:
        self._watcher, self._driver = watcher, cuda_driver()
        missing = [name for name in _CALLS if not hasattr(self._driver, name)]
        if missing:
            raise ConfigError(f"graphs cannot be audited: the CUDA driver has no {missing[0]}; 12.4 and later have it.")
        self._hooks: Any = importlib.import_module("torch.cuda.graphs")
        self._public = hasattr(self._hooks, "register_graph_capture_end_hook")
        self._handles: dict[str, Any] = {}
        self._functions: dict[tuple[int | None, int | None], KernelFunction] = {}
        self.span = _ADDRESSES

    def attach(self) -> None:
        """Show captures from now on."""
        if self._public:
            self._hook("capture_start", self._begun)
            self._hook("capture_end", self._finalized)
            return
        self._replace("capture_begin", self._beginning)
        self._replace("capture_end", self._ending)
        self._replace("reset", self._resetting)

    def watch_replays(self, watched: bool) -> None:
        """Begin or stop showing replays; when stopped, `replay` is torch's own method."""
        (EARLY_LAUNCH_BLOCKERS.add if watched else EARLY_LAUNCH_BLOCKERS.discard)(self)
        if not self._public:
            if watched:
                self._replace("replay", self._replaying)
            else:
                patches.restore(torch.cuda.CUDAGraph, "replay")
        elif watched:
            self._hook("replay_start", self._watcher.replay_begins)
            self._hook("replay_end", self._watcher.replay_ended)
        else:
            for name in ("replay_start", "replay_end"):
                self._handles.pop(name).remove()

    def detach(self) -> None:
        """Put everything back as it was."""
        EARLY_LAUNCH_BLOCKERS.discard(self)
        for handle in self._handles.values():
            handle.remove()
        for name in ("capture_begin", "capture_end", "reset", "replay"):
            patches.restore(torch.cuda.CUDAGraph, name)

    @property
    def is_device_memory(self) -> Callable[[int], bool]:
        """Return a function that asks the driver if an address is in device memory; it caches answers."""
        return device_memory(self._driver)

    @staticmethod
    def segments() -> Iterator[dict[str, Any]]:
        """Yield the allocator's segments, as torch describes them."""
        return allocator.segments()

    # By torch's hooks, which do not raise errors.

    def _hook(self, name: str, function: Callable[[Any], None]) -> None:
        self._handles[name] = getattr(self._hooks, f"register_graph_{name}_hook")(function)

    def _begun(self, graph: Any) -> None:
        with without_collections():
            self._watcher.capture_begins(graph)

    def _finalized(self, graph: Any) -> None:
        with without_collections():
            self._watcher.capture_ended(graph, self._read(int(graph.raw_cuda_graph())))
        # The callback must not hold the graph.
        graph.register_destroy_callback(functools.partial(self._watcher.graph_dropped, id(graph)))

    # By the methods of the class.

    def _replace(self, name: str, replacing: Callable[[Any], Any]) -> None:
        patches.replace(torch.cuda.CUDAGraph, name, lambda original: functools.wraps(original)(replacing(original)))

    def _beginning(self, original: Any) -> Any:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            self._watcher.capture_begins(graph)
            original(graph, *args, **kwargs)

        return capture_begin

    def _ending(self, original: Any) -> Any:
        def capture_end(graph: Any) -> None:
            with without_collections():
                reading = self._read(self._under_capture())  # a graph may be gone when its capture has ended
                original(graph)
            self._watcher.capture_ended(graph, reading)

        return capture_end

    def _resetting(self, original: Any) -> Any:
        def reset(graph: Any) -> None:
            self._watcher.graph_dropped(id(graph))
            original(graph)

        return reset

    def _replaying(self, original: Any) -> Any:
        # A bound method from during the audit may be used later; then it does not notify the watcher.
        begins, ended = self._watcher.replay_begins, self._watcher.replay_ended

        def replay(graph: Any) -> None:
            begins(graph)
            original(graph)
            ended(graph)

        return replay

    def _under_capture(self) -> int:
        """Return the driver's handle of the graph into which the current stream is captured; 0 if there is none."""
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        outputs = ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        failed = self._driver.cuStreamGetCaptureInfo_v2(stream, *outputs, None, None)
        return 0 if failed else graph.value or 0

    def _read(self, handle: int) -> CaptureReading:
        """Copy a graph, which is gone after its capture, so that its nodes can be read later."""
        started, reading, copy = time.perf_counter(), CaptureReading(), ctypes.c_void_p()
        if handle and not self._driver.cuGraphClone(ctypes.byref(copy), ctypes.c_void_p(handle)):
            drop = weakref.finalize(reading, self._driver.cuGraphDestroy, ctypes.c_void_p(copy.value))
            drop.atexit = False  # the driver has ended then

            def parse() -> Sequence[Node]:
                nodes = self._nodes(copy.value or 0, reading)
                drop()
                return nodes

            reading.parse = parse
        else:  # nodes that allocate memory cannot be copied
            nodes = self._nodes(handle, reading)
            reading.parse = lambda: nodes
        reading.seconds = time.perf_counter() - started
        return reading

    def _nodes(self, graph: int, reading: CaptureReading) -> Sequence[Node]:
        """Read the nodes of a graph. Errors are noted, since an audit must not stop a program."""
        try:
            with ProcessMemory() as memory:
                reader = _ShapedReader(self._driver, memory, notes=reading.notes)
                reader._functions = self._functions
                reader.walk([graph] if graph else [])
                nodes = reader.described(*self.span)
                reading.unread = reader.unread
                return nodes
        except Exception as error:
            reading.notes[f"{type(error).__name__}: {error}"] += 1
            return ()


class _ShapedReader(NodeReader):
    """Also reads the shapes of launches, and parameters that are passed in one buffer.

    Attributes:
        unread: the first node whose parameters could not be read; -1 if there is none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.unread = -1
        self._shapes: dict[int, tuple[KernelFunction, Sequence[int]]] = {}
        self._passed: list[tuple[int, KernelFunction, int, int]] = []

    def _launch(self, index: int, node: Any) -> None:
        kernel = self._kernel
        if self.driver.cuGraphKernelNodeGetParams_v2(node, self._kernel_at):
            self.notes["kernel"] += 1
            return
        handles = kernel.func, kernel.kern
        function = self._functions.get(handles)
        if function is None:
            function = self._functions[handles] = self._function(*handles)
        self._shapes[index] = function, tuple(kernel.sizes)
        if function.layout:
            self._passed.append((index, function, kernel.params or 0, kernel.extra or 0))
        elif not function.has_layout:
            self._miss(index, function)

    def _miss(self, index: int, function: KernelFunction) -> None:
        self.notes[f"parameters of {function.name}"] += 1
        self.unread = index if self.unread < 0 else self.unread

    def _read_launches(self) -> list[tuple[int, KernelFunction, tuple[int, ...]]]:
        # Parameters are at the addresses of a list or, as cuBLAS passes them, in one buffer.
        places = [(at, 8 * len(it.layout)) if at else (extra, 32) for _, it, at, extra in self._passed]
        by_launch = [
            _pieces(function, words, packed=not params)
            for (_, function, params, _), words in zip(self._passed, self.memory.read(places), strict=True)
        ]
        contents = iter(self.memory.read([piece for pieces in by_launch for piece in pieces]))
        read = []
        for (index, function, *_), pieces in zip(self._passed, by_launch, strict=True):
            parts = [next(contents) for _ in pieces]
            if parts and None not in parts:
                read.append((index, function, function.unpack(joined(function, parts))))
            else:
                self._miss(index, function)
        return read

    def described(self, low: int, high: int) -> list[Node]:
        """Return the nodes, with the words of their parameters between two addresses."""
        named = {index: (name.partition(" ")[0], "") for words in self._transfers for index, name, *_ in words[:1]}
        for index, (function, sizes) in self._shapes.items():
            grid, block = ("x".join(map(str, part)) for part in (sizes[:3], sizes[3:6]))
            named[index] = function.name, f"{grid} · {block}"
        by_node: dict[int, tuple[list[int], list[int]]] = {}
        for node in self.words(low, high, list):
            parts = by_node[node[0][0]] = ([], [])
            for _, _, value, certain, _ in node:
                parts[not certain].append(value)
        nothing: tuple[list[int], list[int]] = ([], [])
        return [Node(*named.get(at, ("event", "")), *by_node.get(at, nothing)) for at in range(self.nodes)]


def _pieces(function: KernelFunction, buffer: bytes | None, *, packed: bool) -> Sequence[Piece]:
    """Return where the parameters of a launch are, by the list of their addresses or the description of one buffer."""
    words = struct.unpack(f"<{len(buffer or b'') // 8}Q", buffer or b"")
    if packed:  # pairs: CU_LAUNCH_PARAM_BUFFER_POINTER is 1
        start = dict(zip(words[::2], words[1::2], strict=True)).get(1)
        return [(start, function.size)] if start else ()
    return places_of(function, words) if words else ()


class EmulatedGraphs:
    """Shows a watcher every segment that the emulator captures in this process; see `CudaGraphs`."""

    device = "cpu"

    def __init__(self, watcher: Watcher) -> None:
        from simplegraph.device.emulator.arena import EmulatorSegment
        from simplegraph.device.emulator.device import EmulatorDevice

        self._watcher, self._device, self._segment = watcher, EmulatorDevice, EmulatorSegment
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def attach(self) -> None:
        """Show captures from now on."""
        begin, end, reset = self._device.begin, self._device.end, self._segment.reset

        @functools.wraps(begin)
        def beginning(*args: Any, **kwargs: Any) -> None:
            self._watcher.capture_begins(None)
            begin(*args, **kwargs)

        @functools.wraps(end)
        def ending(device: Any) -> Any:
            segment = end(device)
            if segment is not None:
                self._graphs.add(segment)
                self._watcher.capture_ended(segment, _read_emulated(segment))
            return segment

        @functools.wraps(reset)
        def resetting(segment: Any) -> None:
            self._watcher.graph_dropped(id(segment))
            reset(segment)

        patches.replace(self._device, "begin", lambda _: beginning)
        patches.replace(self._device, "end", lambda _: ending)
        patches.replace(self._segment, "reset", lambda _: resetting)

    def watch_replays(self, watched: bool) -> None:
        """Show replays, too, or no longer."""
        (EARLY_LAUNCH_BLOCKERS.add if watched else EARLY_LAUNCH_BLOCKERS.discard)(self)
        if not watched:
            patches.restore(self._segment, "replay")
            return
        original = self._segment.replay

        @functools.wraps(original)
        def replay(segment: Any) -> None:
            self._watcher.replay_begins(segment)
            original(segment)
            self._watcher.replay_ended(segment)

        patches.replace(self._segment, "replay", lambda _: replay)

    def detach(self) -> None:
        """Put everything back as it was."""
        for owner, name in ((self._device, "begin"), (self._device, "end"), (self._segment, "reset")):
            patches.restore(owner, name)
        self.watch_replays(False)

    def segments(self) -> Iterator[dict[str, Any]]:
        """Describe the memory of segments in the form of torch's allocator."""
        for segment in list(self._graphs):
            yield from (_as_segment(memory, id(segment._arena)) for memory in segment._created)
            yield from (_as_segment(kept, 0) for _, kept, _, _ in segment._outside if kept is not None)

    @staticmethod
    def is_device_memory(address: int) -> bool:
        """Return False: there is no driver to ask."""
        return False


def _as_segment(memory: Any, pool: int) -> dict[str, Any]:
    size, state = memory.storage.nbytes(), "inactive" if memory.reusable() else "active_allocated"
    blocks = [{"size": size, "state": state}]
    return {"address": memory.address, "total_size": size, "segment_pool_id": (0, pool), "blocks": blocks}


def _read_emulated(segment: Any) -> CaptureReading:
    nodes = []
    for call in segment._calls or ():
        tensors = [leaf for leaf in pytree.tree_leaves(call[1:]) if isinstance(leaf, Tensor)]
        addresses = [tensor.data_ptr() for tensor in tensors if tensor.numel()]
        nodes.append(Node(str(inspect.unwrap(call.func)), "", addresses))
    return CaptureReading(lambda: nodes)


def graph_source(watcher: Watcher) -> CudaGraphs | EmulatedGraphs:
    """Return the source of graphs on this machine: torch's graphs if there is a GPU's driver, else the emulator's."""
    # Asking torch for a GPU could initialize CUDA, after which a process must not fork.
    return EmulatedGraphs(watcher) if cuda_driver() is None else CudaGraphs(watcher)
