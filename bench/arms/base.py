"""The base class of arms: ways to make a model ready for batches of several sizes."""

from __future__ import annotations

import abc
import bisect
import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.models.llama import Llama
from bench.models.workload import INPUT_NAMES, PAD_VALUES, Batch, Workload
from bench.tools.measure import Call, Timeline
from bench.tools.replays import Replays, Served
from simplegraph import RankGroup


def padded_size(sizes: list[int], count: int) -> int:
    """Return the smallest of the ascending sizes that holds `count` requests.

    Raises:
        ValueError: none does.
    """
    index = bisect.bisect_left(sizes, count)
    if index == len(sizes):
        raise ValueError(f"a batch of {count} requests is above the largest size, {sizes[-1]}.")
    return sizes[index]


def fill(static: Batch, batch: tuple[Tensor, ...]) -> None:
    """Copy a batch into static inputs of at least its size, and set the rows behind it to padding."""
    count = batch[0].shape[0]
    for name, buffer, value in zip(INPUT_NAMES, static, batch, strict=True):
        buffer[:count].copy_(value)
        if count < buffer.shape[0]:
            buffer[count:].fill_(PAD_VALUES[name])


def rows(batch: Batch, count: int) -> Batch:
    """Return the first rows of every input, as views."""
    return tuple(tensor[:count] for tensor in batch)  # type: ignore[return-value]


class NotAvailable(RuntimeError):
    """This arm cannot run here; the message says why. It does not count as a failure."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """The inputs of every arm.

    Args:
        model: the model, on its device.
        workload: makes its batches.
        ranks: the ranks that run the model together.
    """

    model: Llama
    workload: Workload
    ranks: RankGroup | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.workload.device

    @property
    def sizes(self) -> list[int]:
        """Batch sizes to have ready, largest first."""
        return sorted(self.workload.sizes, reverse=True)

    @property
    def segments(self) -> int:
        """Graph segments of a step that breaks at the attention of every layer."""
        return self.model.config.num_hidden_layers + 1

    @functools.cached_property
    def largest(self) -> Batch:
        """A batch of the largest size, made once, before any timing starts."""
        return self.batch(self.sizes[0])

    @functools.cached_property
    def on_dtensors(self) -> Llama:
        """The model by `parallelize_module`, on the same weights and caches; made once, before any timing starts.

        Raises:
            NotAvailable: there is one rank.
        """
        if self.ranks is None:
            raise NotAvailable("DTensors need several ranks: torchrun --nproc-per-node 2 -m bench --tp 2")
        from torch.distributed.device_mesh import init_device_mesh

        from bench.models.dtensor import with_dtensors

        return with_dtensors(self.model, init_device_mesh(self.device.type, (self.ranks.size,)))

    def batch(self, count: int, **options: Any) -> Batch:
        """Make one decode step of `count` requests; options as for `Workload.batch`."""
        return self.workload.batch(count, self.model.config.vocab_size, **options)


class Arm(abc.ABC):
    """One way to run a model; started once, then called with any batch up to the largest size.

    Attributes:
        exact: outputs of a captured size must equal eager's, or differ by the dtype's rounding alone.
        compiles: the arm has a compile cache, and is measured with a cold and a warm one.
        restartable: a second start in the same process is measured, without the cost of loading libraries.
        replays: of our graphs, while the arm is timed.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    restartable: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.notes: list[str] = []
        self.replays = Replays()

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        """Raise `NotAvailable` if this arm cannot run here; most can run anywhere."""
        return None

    @classmethod
    def load(cls, setup: Setup) -> None:
        """Load the libraries that this arm needs, before any timing starts."""
        return None

    @abc.abstractmethod
    def start(self, first: Batch, timeline: Timeline) -> None:
        """Prepare all sizes, in this arm's natural order.

        Marks ``first_output`` when the output of `first`, a batch of one request, is computed, and
        ``ready`` when every size is.
        """

    @abc.abstractmethod
    def __call__(self, *batch: Tensor) -> Tensor:
        """Compute the model's output for a batch; the next call may overwrite it."""

    def call(self, batch: Batch) -> Call:
        """Return the computation of a batch as a call; where it is timed, our graphs must serve it."""
        return Served(functools.partial(self, *batch), self.replays)

    def graphs(self) -> str:
        """Return the kind of graphs that the timed steps replayed: ``CUDA graphs``, ``emulator`` or ``none``."""
        return "none"

    def details(self) -> dict[str, Any]:
        """Return further figures of the arm, for the JSON."""
        return {}


class OnDTensors(Arm):
    """An arm whose model uses torch's own tensor parallelism, on the same weights."""

    @classmethod
    def load(cls, setup: Setup) -> None:
        _ = setup.on_dtensors

    @property
    def model(self) -> Llama:
        """The model that runs."""
        return self.setup.on_dtensors


def require_cuda(device: torch.device, what: str) -> None:
    """Raise `NotAvailable` on a CPU."""
    if device.type != "cuda":
        raise NotAvailable(f"{what} needs a GPU")
