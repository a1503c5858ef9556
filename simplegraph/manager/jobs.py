"""A graph to capture, what came of capturing several, and the memory that they take."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import HostError, InputError
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.device.protocol import GraphDevice

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
        inputs: what it is captured for, by argument, as text for the report.
        exact: it has no batch dimension, so that labels name the inputs instead.
        name: names a tensor that the forward found somewhere, for messages; None if it cannot.
        part: of a training call, "forward" or "backward"; "" for a whole call.
        follows: the key of the job before it whose graph is always replayed first, and whose memory it reads.
        ended: called when its recording is over.
        refused: why it cannot be captured, if a run showed that.
    """

    key: Key
    mode: CudaGraphMode
    descriptor: BatchDescriptor
    run: Callable[[], Any]
    generators: tuple[torch.Generator, ...] = ()
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    name: Callable[[torch.Tensor], str | None] = lambda _: None
    exact: bool = False
    part: str = ""
    follows: Key | None = None
    ended: Callable[[], object] = bool
    refused: HostError | None = None

    @property
    def rows(self) -> int:
        """The padded batch size."""
        return self.descriptor.num_tokens

    @functools.cached_property
    def label(self) -> str:
        kind = "" if self.mode is CudaGraphMode.FULL else f", {self.mode.name}"
        if self.exact:
            shown = {name: text for name, text in self.inputs.items() if name != "state"}
            return f"a call with {', '.join(map(' '.join, shown.items())) or 'no arguments'}{kind}"
        loras = f", {self.descriptor.num_active_loras} LoRAs" if self.descriptor.num_active_loras else ""
        uniform = ", uniform decode" if self.descriptor.uniform_query_len else ""
        part = f", {self.part}" if self.part else ""
        return f"batch size {self.descriptor.num_tokens}{uniform}{loras}{kind}{part}"

    @property
    def label_with_inputs(self) -> str:
        return f"{self.label} of {', '.join(map(' '.join, self.inputs.items()))}"


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """The memory that capturing everything takes: the largest graph, and what each further one adds.

    Attributes:
        graphs: how many there are.
        first_bytes: device memory of the largest graph and of what all share.
        next_bytes: what a further one adds, on average.
        emulated: True if the graphs were imitated: then it is the memory of their tensors, without what a driver needs.
    """

    graphs: int
    first_bytes: int
    next_bytes: int
    emulated: bool = False

    @classmethod
    def measured(cls, device: GraphDevice, taken: Sequence[int], total: int) -> MemoryEstimate:
        """Share out the memory that a capture took, while its graphs live.

        Args:
            device: where they were captured.
            taken: bytes of each graph, the largest first.
            total: bytes of all, with what libraries keep for a stream that they run on first.
        """
        free, further = device.free_memory(), sum(taken[1:])
        device.release_cached_memory()  # what warmups took, which no graph needs
        first = max(total - (device.free_memory() - free), sum(taken)) - further
        return cls(len(taken), first, round(further / max(1, len(taken) - 1)), device.emulated)

    @property
    def bytes(self) -> int:
        return self.first_bytes + max(0, self.graphs - 1) * self.next_bytes

    def __str__(self) -> str:
        emulated = " (emulated: tensors only)" if self.emulated else ""
        return f"memory of {self.graphs} graphs: about {self.bytes / 2**20:.1f} MiB{emulated}"


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
