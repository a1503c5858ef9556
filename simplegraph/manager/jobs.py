"""A graph to capture, what came of capturing several, and the memory that they take."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.errors import CaptureError, HostError, InputError
from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.device.protocol import GraphDevice

Forward = Callable[[CudaGraphMode, BatchDescriptor], Any]
Key = Hashable
_BATCH_SIZE = "batch size "
_MOST_SIZES = 8  # listed one by one in a message


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
        return f"{_BATCH_SIZE}{self.descriptor.num_tokens}{uniform}{loras}{kind}{part}"

    @property
    def label_with_inputs(self) -> str:
        return f"{self.label} of {', '.join(map(' '.join, self.inputs.items()))}"


def joined_labels(labels: Sequence[str]) -> str:
    """Name several jobs at once: "batch sizes 8, 4"; labels that differ by more than the size are listed in full."""
    sizes = [label.removeprefix(_BATCH_SIZE).partition(",") for label in labels]
    sized = all(label.startswith(_BATCH_SIZE) for label in labels)
    if len(labels) == 1 or not sized or len({rest for _, _, rest in sizes}) > 1:
        return ", ".join(labels)
    numbers = sorted((int(size) for size, _, _ in sizes), reverse=True)
    shown = [str(number) for number in numbers]
    if len(shown) > _MOST_SIZES:
        shown[_MOST_SIZES - 1 : -1] = [f"... ({len(numbers)} of them)"]
    _, comma, rest = sizes[0]
    return f"batch sizes {', '.join(shown)}{comma}{rest}"


def origin(label: str, message: str) -> str:
    """Return what a failure's message says of its cause: equal for batch sizes that fail alike."""
    first, *rest = message.splitlines()
    return "\n".join([first.replace(label, "", 1), *(re.sub(r"\d+", "", line) for line in rest)])


def merged_failures(failures: Mapping[str, str]) -> list[tuple[str, str]]:
    """Merge the messages of failures that have one origin; return the labels joined, and a message that names all.

    Args:
        failures: messages by label.
    """
    groups: dict[str, list[str]] = {}
    for label, message in failures.items():
        groups.setdefault(origin(label, message), []).append(label)
    merged = [(labels[0], joined_labels(labels)) for labels in groups.values()]
    return [(labels, failures[first].replace(first, labels, 1)) for first, labels in merged]


def headline(message: str) -> str:
    """Return the first two lines of an error: what failed, where and why, without the advice after them."""
    return ": ".join(line.strip() for line in message.splitlines()[:2])


@dataclasses.dataclass(frozen=True)
class CaptureSummary:
    """The result of capturing several sizes.

    Attributes:
        captured: how many graphs were captured.
        failed: label -> error of those that were not.
        seconds: wall time, warmup included, without ``inventory``.
        bytes: device memory taken, as the device's free memory saw it.
        parts: where the seconds went: ``communicators`` that were set up, ``meetings`` of ranks, which includes waiting
            for the slowest, ``warmup``, ``capture`` and ``instantiate``, waiting for the driver at the end. Beside them
            ``inventory``, asking it what graphs touch.
    """

    captured: int
    failed: dict[str, CaptureError]
    seconds: float
    bytes: int
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        total = f"{self.captured} of {self.captured + len(self.failed)} graphs captured"
        failures = {label: str(error) for label, error in self.failed.items()}
        lines = [f"  failed: {headline(message)}" for _, message in merged_failures(failures)]
        read = f" (and {seconds:.3f} s to read what they touch)" if (seconds := self.parts.get("inventory")) else ""
        return "\n".join([f"{total} in {self.seconds:.3f} s{read}, {self.bytes / 2**20:.1f} MiB", *lines])


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
        return f"memory of {self.graphs} graph{'s' * (self.graphs != 1)}: about {self.bytes / 2**20:.1f} MiB{emulated}"


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
