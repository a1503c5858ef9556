"""A device for graphs of tensors without values, beside which CPU tensors are the host's, as beside those on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph.call.inputs import InputSet, StaticInput, slot
from simplegraph.device.protocol import GraphPool
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.serve.builder import GraphBuilder
from simplegraph.serve.runner import GraphRunner


class MetaSegment:
    """Replays nothing."""

    num_nodes = 1

    def wait(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass


class MetaMark:
    def wait(self) -> None:
        pass

    def ms_since(self, earlier: Any) -> float:
        return 0.0


class MetaDevice:
    """The `GraphDevice` protocol on the meta device, with nothing behind it."""

    emulated = True
    dtype = torch.float32
    torch_device = torch.device("meta")

    def __init__(self) -> None:
        self.capturing = False
        self.drawing_stream = 0

    def recorded(self) -> tuple[int, int] | None:
        return None

    def new_pool(self) -> GraphPool:
        return GraphPool(self, None, 0)  # type: ignore[arg-type]

    def release_pool(self, pool: GraphPool) -> None:
        pass

    @contextlib.contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        yield

    def own_allocations(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def current_stream(self) -> int:
        return 0

    def wait_for(self, stream: int) -> None:
        pass

    def is_capturing(self) -> bool:
        return self.capturing

    def begin(self, pool: GraphPool, generators: Any = (), *, continues: bool = False) -> None:
        self.capturing = True

    def end(self) -> MetaSegment:
        self.capturing = False
        return MetaSegment()

    def abandon(self) -> None:
        self.capturing = False

    def synchronize(self) -> None:
        pass

    def release_cached_memory(self) -> None:
        pass

    def cache_releases(self) -> int:
        return 0

    def mark(self) -> MetaMark:
        return MetaMark()

    def free_memory(self) -> int:
        return 0

    def in_pool(self, pool: GraphPool, tensor: Tensor) -> bool:
        return False

    def left_alive(self, pool: GraphPool) -> set[int]:
        return set()

    def borrow(self, pool: GraphPool, tensor: Tensor) -> Tensor:
        return tensor


def _copied_part(static: StaticInput, padded: int, end: int, *, reference: bool = False) -> Tensor:
    return torch.zeros_like(static.part(padded, 0, end), device="meta" if static.host is None else "cpu")


def use_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let wrapped modules capture on the meta device. Without values no proof compares any: pass verify=0."""

    def builder_for(runner: Any, module: Any, leaves: Any) -> GraphBuilder:
        if runner.builder is None:
            manager = CudaGraphManager(runner.config, device=MetaDevice(), requests=False, stats=runner.stats)  # type: ignore[arg-type]
            runner.builder = GraphBuilder(manager, runner._calls.reader(module))
        return runner.builder  # type: ignore[no-any-return]

    monkeypatch.setattr(GraphRunner, "_builder_for", builder_for)
    monkeypatch.setattr(
        "simplegraph.base.extras.memory_sources", []
    )  # another test may have made memory that can sleep
    generator = torch.Generator()
    for home in ("program.program", "call.external_memory"):
        monkeypatch.setattr(f"simplegraph.{home}.default_generator", lambda device: generator)
    # No value can be copied from there to the CPU.
    monkeypatch.setattr(InputSet, "load_hosts", lambda self, padded: None)
    monkeypatch.setattr(StaticInput, "copied_part", _copied_part)
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cuda": kind != "meta" and enabled(kind))
    index = torch.empty(0, device="meta").get_device()
    monkeypatch.setattr("simplegraph.call.plan.slot", lambda *args: slot(*args)._replace(device_index=index))
