"""A graph to capture, and what came of capturing several."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch

from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.config import CudaGraphMode
from simplegraph.errors import CaptureError, InputError

Forward = Callable[[CudaGraphMode, BatchDescriptor], Any]
Key = Hashable


@dataclasses.dataclass(frozen=True)
class CaptureJob:
    """One graph to capture.

    Attributes:
        key: what it will be replayed by.
        mode, descriptor: what it serves.
        run: the forward, on static inputs.
        generators: random generators the forward draws from, beside the default one.
    """

    key: Key
    mode: CudaGraphMode
    descriptor: BatchDescriptor
    run: Callable[[], Any]
    generators: tuple[torch.Generator, ...] = ()

    @property
    def label(self) -> str:
        kind = "" if self.mode is CudaGraphMode.FULL else f", {self.mode.name}"
        loras = f", {self.descriptor.num_active_loras} LoRAs" if self.descriptor.num_active_loras else ""
        uniform = ", uniform decode" if self.descriptor.uniform_query_len else ""
        return f"batch size {self.descriptor.num_tokens}{uniform}{loras}{kind}"


@dataclasses.dataclass(frozen=True)
class CaptureSummary:
    """The result of capturing several sizes.

    Attributes:
        captured: how many graphs were captured.
        failed: label -> error of those that were not.
        seconds: wall time, warmup included.
        bytes: device memory taken, as the device's free memory saw it.
    """

    captured: int
    failed: dict[str, CaptureError]
    seconds: float
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that capturing everything would take: the largest graph, and what each further one adds.

    Attributes:
        graphs: how many there would be.
        first_bytes: device memory of the largest graph; next_bytes: what the next one added to it.
    """

    graphs: int
    first_bytes: int
    next_bytes: int

    @property
    def bytes(self) -> int:
        return self.first_bytes + max(0, self.graphs - 1) * self.next_bytes


def bind_forward(forward: Forward, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Callable[[], Any]:
    """Bind an engine's forward to one descriptor, and refuse what a capture cannot hold."""

    def run() -> Any:
        outputs = forward(mode, descriptor)
        if isinstance(outputs, (types.GeneratorType, types.AsyncGeneratorType, types.CoroutineType)):
            raise InputError(
                f"the forward returned a {type(outputs).__name__}, whose body would run after the capture; "
                "return its values instead."
            )
        return outputs

    return run
