"""A stand-in for `torch.cuda.CUDAGraph`, the driver and the allocator on a CPU, before torch had hooks and since."""

from __future__ import annotations

import ctypes
import mmap
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from stand_in_driver import Driver, Kernel, pointer
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils.hooks import RemovableHandle

from simplegraph.device.cuda import allocator
from simplegraph.doctor import attach

POOL = (0, 7)
BLOCK = 512  # bytes


class DeviceMemory:
    """Memory of a device, block by block; a block is allocated while a tensor has it, or `kept` says so."""

    def __init__(self) -> None:
        # Above 4 GiB, as a device's memory is; the heap of a Python that was built for fixed addresses is below.
        self.buffer = (ctypes.c_char * (64 * BLOCK)).from_buffer(mmap.mmap(-1, 64 * BLOCK))
        self.base = ctypes.addressof(self.buffer)
        self.pools: dict[int, tuple[int, int]] = {}
        self.kept: set[int] = set()
        self.frames: dict[int, list[dict[str, Any]]] = {}
        self._owners: dict[int, list[Any]] = {}

    def address(self, block: int) -> int:
        return self.base + block * BLOCK

    def tensor(self, block: int, pool: tuple[int, int] = (0, 0)) -> Tensor:
        """Allocate a block, and return the tensor in it."""
        self.pools[block] = pool
        made = torch.frombuffer(self.buffer, dtype=torch.float32, offset=block * BLOCK, count=8)
        self._owners.setdefault(block, []).append(reductions.StorageWeakRef(made.untyped_storage()))
        return made

    def workspace(self, block: int) -> int:
        """Allocate a block for a library, and return its address."""
        self.pools[block] = (0, 0)
        self.kept.add(block)
        return self.address(block)

    def unmap(self, block: int) -> None:
        del self.pools[block]

    def segments(self, pool_ids: Any = None) -> list[dict[str, Any]]:
        found = []
        for block, pool in self.pools.items():
            held = block in self.kept or not all(owner.expired() for owner in self._owners.get(block, ()))
            state = "active_allocated" if held else "inactive"
            blocks = [{"size": BLOCK, "state": state, "frames": self.frames.get(block, [])}]
            segment = {"address": self.address(block), "total_size": BLOCK, "segment_pool_id": pool, "blocks": blocks}
            found.append(segment)
        return found


class StandInDriver(Driver):
    """Knows the graph that is captured, copies of earlier ones, and no memory but the allocator's."""

    def __init__(self, nodes: Sequence[Any]) -> None:
        copies: dict[int, list[Any]] = getattr(self, "copies", {})
        super().__init__(nodes)
        self.copies = copies
        self.graphs |= copies
        for copied in copies.values():
            self._take(copied)

    def cuGraphClone(self, copy: Any, graph: Any) -> int:
        copy._obj.value = number = 1000 + len(self.copies)
        self.copies[number] = self.graphs[number] = self.graphs[graph.value]
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        self.graphs.pop(graph.value)
        self.copies[graph.value] = []
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, graph: Any, *rest: Any) -> int:
        graph._obj.value = 1
        return 0

    def cuPointerGetAttribute(self, *arguments: Any) -> int:
        return 1


class StandInGraph:
    """Has the methods of `torch.cuda.CUDAGraph` up to 2.13. A capture records the kernels of `launched`."""

    driver: StandInDriver
    replays = 0

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return POOL


class HookedGraph(StandInGraph):
    """Has the methods of `torch.cuda.CUDAGraph` since 2.15, and runs the hooks of all graphs when it does."""

    hooks: dict[str, OrderedDict[int, Callable[[Any], None]]]

    def __init__(self, keep_graph: bool = False) -> None:
        self.dropped: list[Callable[[], None]] = []

    def _run(self, name: str) -> None:
        for hook in list(self.hooks.get(name, {}).values()):
            hook(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._run("capture_start")

    def capture_end(self) -> None:
        self._run("capture_end")

    def raw_cuda_graph(self) -> int:
        return 1

    def replay(self) -> None:
        self._run("replay_start")
        super().replay()
        self._run("replay_end")

    def register_destroy_callback(self, callback: Callable[[], None]) -> None:
        self.dropped.append(callback)

    def reset(self) -> None:
        for callback in self.dropped:
            callback()


def _hooks_module(hooks: dict[str, OrderedDict[int, Callable[[Any], None]]]) -> types.ModuleType:
    module = types.ModuleType("torch.cuda.graphs")

    def registering(name: str) -> Callable[[Any], RemovableHandle]:
        def register(hook: Any) -> RemovableHandle:
            table = hooks.setdefault(name, OrderedDict())
            handle = RemovableHandle(table)
            table[handle.id] = hook
            return handle

        return register

    for name in ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy"):
        setattr(module, f"register_graph_{name}_hook", registering(name))
    return module


def stand_in_cuda(monkeypatch: pytest.MonkeyPatch, *, hooks: bool) -> tuple[Any, DeviceMemory]:
    """Let this process have a device, whose graphs are of torch 2.15, or before; return their class and the memory."""
    memory, driver = DeviceMemory(), StandInDriver([])
    table: dict[str, Any] = {}
    kind: Any = type("CUDAGraph", (HookedGraph if hooks else StandInGraph,), {"hooks": table, "driver": driver})
    if not hooks:  # methods of its own, as torch's class has
        kind = type("CUDAGraph", (), {**vars(StandInGraph), "driver": driver})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", kind)
    module = _hooks_module(table) if hooks else types.ModuleType("torch.cuda.graphs")
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setattr(allocator, "segments", memory.segments)
    monkeypatch.setattr(attach, "cuda_driver", lambda: driver)
    monkeypatch.setattr(attach.CudaGraphs, "device", "cpu")
    return kind, memory


def capture(graph: Any, *kernels: tuple[str, tuple[Any, ...]]) -> Any:
    """Capture kernels into a graph: names, and what they are passed: tensors or addresses."""
    graph.capture_begin()
    addresses = [[it.data_ptr() if isinstance(it, Tensor) else it for it in passed] for _, passed in kernels]
    nodes = [Kernel(name, *map(pointer, each)) for (name, _), each in zip(kernels, addresses, strict=True)]
    type(graph).driver.__init__(nodes)
    graph.capture_end()
    return graph
