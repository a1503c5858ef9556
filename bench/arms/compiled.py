"""torch.compile over the whole model, one full CUDA graph per size captured over the result."""

from __future__ import annotations

import abc
import os
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._inductor.compile_fx  # the compiler loads here, not under the clock
from torch import Tensor

from bench.arms.base import Arm, NotAvailable, Setup, fill, padded_size, rows
from bench.models.workload import Batch
from bench.tools.lean_capture import LeanCapture, alias
from bench.tools.measure import Timeline, say

Replay = Callable[[], Tensor]

CPP_COMPILERS = (os.environ.get("CXX") or "g++", "clang++")
# This machine's own number: some packages set it to one when they are imported.
COMPILE_THREADS = torch._inductor.config.compile_threads


def without_guards(guards: Sequence[Any]) -> list[bool]:
    """Drop all guards: one compilation serves every size, even 1, which Dynamo would compile separately."""
    return [False] * len(guards)


class Compiled(Arm, abc.ABC):
    """Compiled once with a dynamic batch dimension, at the largest size; on a GPU each size is captured after it."""

    exact = False
    compiles = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._ascending = sorted(setup.sizes)
        self._static: Batch = tuple(tensor.clone() for tensor in setup.largest)  # type: ignore[assignment]
        torch._inductor.config.compile_threads = COMPILE_THREADS
        self._compiled = self.compile(setup.model)
        self._views = {size: rows(self._static, size) for size in setup.sizes}
        self._replays: dict[int, Replay] = {}
        self._lean = LeanCapture() if setup.device.type == "cuda" else None

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        if device.type == "cpu" and not any(map(shutil.which, CPP_COMPILERS)):
            raise NotAvailable(f"Inductor needs a C++ compiler on a CPU: none of {', '.join(CPP_COMPILERS)} is here")

    @abc.abstractmethod
    def compile(self, model: torch.nn.Module) -> Callable[..., Tensor]:
        """Return the compiled model; the compilation itself may happen at the first call."""

    @abc.abstractmethod
    def capture(self, lean: LeanCapture, views: Batch) -> Replay:
        """Capture one size; return a callable that replays it and returns its output."""

    def start(self, first: Batch, timeline: Timeline) -> None:
        if self._lean is None:
            self.notes.append("compiled with the C++ compiler, no CUDA graphs")
            self.compile_and_run(first, timeline)
            for size in self.setup.sizes:
                self._compiled(*self._views[size])
        else:
            with self._lean.on_stream():
                self.compile_and_run(first, timeline)
            with self._lean.session():
                for size in self.setup.sizes:
                    self._replays[size] = self.capture(self._lean, self._views[size])
        timeline.mark("ready")

    def compile_and_run(self, first: Batch, timeline: Timeline) -> None:
        """Compile with the largest batch, then run the first one."""
        for tensor in self._static:
            torch._dynamo.mark_dynamic(tensor, 0)
        self._compiled(*self._static)
        timeline.mark("compiled")
        say(f"{self.name}: compiled after {timeline.seconds['compiled']:.1f} s")
        self(*first)
        timeline.mark("first_output")

    def __call__(self, *batch: Tensor) -> Tensor:
        count = batch[0].shape[0]
        if not self._replays:
            return self._compiled(*batch)
        size = padded_size(self._ascending, count)
        fill(self._views[size], batch)
        return self._replays[size]()[:count]

    def graphs(self) -> str:
        return "CUDA graphs" if self._lean else "none"

    def details(self) -> dict[str, Any]:
        counters = torch._dynamo.utils.counters
        cached = {name: dict(counters[name]) for name in ("inductor", "aot_autograd") if name in counters}
        hits = {name: value for group in cached.values() for name, value in group.items() if "cache" in name}
        captures = self._lean.graphs if self._lean else 0
        return {"captures": captures, "cache": hits, "compile_threads": COMPILE_THREADS}


class CompiledFull(Compiled):
    """One compiled function, one graph per size."""

    name = "compiled-full"

    def compile(self, model: torch.nn.Module) -> Callable[..., Tensor]:
        return torch.compile(model, fullgraph=True, options={"guard_filter_fn": without_guards})

    def capture(self, lean: LeanCapture, views: Batch) -> Replay:
        graph, output = lean.capture(self._compiled, *views)
        return _FullReplay(graph, alias(output))


class _FullReplay:
    """One graph and the output it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph, self._output = graph, output

    def __call__(self) -> Tensor:
        self._graph.replay()
        return self._output
