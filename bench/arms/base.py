"""What an arm is: one way to make a model ready for batches of several sizes."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.models.llama import Llama
from bench.models.workload import Batch, Workload
from bench.tools.measure import Timeline
from simplegraph import RankGroup


class NotAvailable(RuntimeError):
    """This arm cannot run here; the message says why. That is no failure."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every arm is given.

    Args:
        model: built, on its device.
        workload: makes its batches.
        ranks: those that run the model together with this one.
    """

    model: Llama
    workload: Workload
    ranks: RankGroup | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.workload.device

    @property
    def sizes(self) -> list[int]:
        """Batch sizes to have ready, largest first."""
        return sorted(self.workload.sizes, reverse=True)

    @property
    def segments(self) -> int:
        """Graphs that one step becomes where it breaks once in every layer, at attention."""
        return self.model.config.num_hidden_layers + 1

    @functools.cached_property
    def largest(self) -> Batch:
        """A batch of the largest size, made once, before any clock runs."""
        return self.batch(self.sizes[0])

    @functools.cached_property
    def on_dtensors(self) -> Llama:
        """The model as `parallelize_module` makes it, on the same weights and caches; made once, before any clock runs.

        Raises:
            NotAvailable: there is one rank.
        """
        if self.ranks is None:
            raise NotAvailable("DTensors need several ranks: torchrun --nproc-per-node 2 -m bench --tp 2")
        from torch.distributed.device_mesh import init_device_mesh

        from bench.models.dtensor import with_dtensors

        return with_dtensors(self.model, init_device_mesh(self.device.type, (self.ranks.size,)))

    def batch(self, count: int, **options: Any) -> Batch:
        """One decode step of `count` requests; options as `Workload.batch` takes."""
        return self.workload.batch(count, self.model.config.vocab_size, **options)


class Arm(abc.ABC):
    """One way to run a model; started once, then called with any batch up to the largest size.

    Attributes:
        exact: outputs of a captured size must equal eager's, or differ by the dtype's rounding alone.
        compiles: the arm has a compile cache, and is measured with a cold and a warm one.
        restartable: a second start in the same process tells something: the cost without the libraries' own.
    """

    name: ClassVar[str]
    exact: ClassVar[bool] = True
    compiles: ClassVar[bool] = False
    restartable: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.notes: list[str] = []

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        """Raise `NotAvailable` where this arm cannot run; most run anywhere."""
        return None

    @classmethod
    def load(cls, setup: Setup) -> None:
        """Load libraries that every process of such an arm loads, before any clock runs."""
        return None

    @abc.abstractmethod
    def start(self, first: Batch, timeline: Timeline) -> None:
        """Get ready in this arm's natural order.

        Marks ``first_output`` when the output of `first`, a batch of one request, is there, and
        ``ready`` when every size is.
        """

    @abc.abstractmethod
    def __call__(self, *batch: Tensor) -> Tensor:
        """The model's output for a batch; may be overwritten by the next call."""

    def graphs(self) -> str:
        """What the arm replays: ``CUDA graphs``, ``emulator`` or ``none``."""
        return "none"

    def details(self) -> dict[str, Any]:
        """What else the arm knows about itself, for the JSON."""
        return {}


class OnDTensors(Arm):
    """An arm whose model is as torch's own tensor parallelism makes it, on the same weights."""

    @classmethod
    def load(cls, setup: Setup) -> None:
        _ = setup.on_dtensors

    @property
    def model(self) -> Llama:
        """What runs."""
        return self.setup.on_dtensors


def require_cuda(device: torch.device, what: str) -> None:
    """Raise `NotAvailable` on a CPU."""
    if device.type != "cuda":
        raise NotAvailable(f"{what} needs a GPU")
