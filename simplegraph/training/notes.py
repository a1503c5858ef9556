"""Facts that eager calls under grad mode, and their backwards, showed: captures follow them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.modes import ANY_AUTOCAST, autocast_dtype


class OutputLook(NamedTuple):
    """The look of an output.

    Attributes:
        wanting: it wants gradients.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanting: bool

    @classmethod
    def of(cls, output: Tensor) -> OutputLook:
        """Look at an output."""
        return cls(output.shape, output.stride(), output.dtype, output.device, output.requires_grad)

    def like(self, other: OutputLook) -> bool:
        """True if one buffer does for both: strides may follow those of inputs."""
        return self._replace(stride=()) == other._replace(stride=())

    def buffer(self) -> Tensor:
        """Make memory for its gradient."""
        with torch.inference_mode(False), torch.no_grad():
            dense = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            return torch.zeros_like(dense)


class Needs(NamedTuple):
    """The needs of a backward: to keep what it reads for another, and the dtype of autocast around it."""

    retained: bool = False
    autocast: torch.dtype | None = None


class BackwardNotes:
    """Keeps the facts that eager calls of one signature, and their backwards, showed.

    Attributes:
        device_type: of the device that they ran on.
        outputs: how the outputs of the last call looked.
        seen: the outputs that they gave gradients to, by their number; None before the first.
        twice: True if one shall be differentiated itself.
        needs: of the last one, and of any to keep what it reads: graphs of backwards differ by these.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.outputs: list[OutputLook] = []
        self.seen: set[int] | None = None
        self.twice = False
        self.needs = Needs()

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Look at the outputs of an eager call, and later at its backward."""
        self.outputs = list(map(OutputLook.of, outputs))
        nodes: dict[int, tuple[Any, list[tuple[int, int]]]] = {}
        for number, output in enumerate(outputs):
            if output.grad_fn is not None:
                nodes.setdefault(id(output.grad_fn), (output.grad_fn, []))[1].append((output.output_nr, number))
        backwards: set[int] = set()  # of this call
        for node, places in nodes.values():
            node.register_prehook(lambda grads, places=places: self._look(grads, places, backwards))

    def _look(self, grads: Sequence[Tensor | None], places: Sequence[tuple[int, int]], backwards: set[int]) -> None:
        backwards.add(_number_of_backward())
        self.twice = self.twice or torch.is_grad_enabled()
        self.add({number for at, number in places if grads[at] is not None}, again=len(backwards) > 1)

    def add(self, outputs: Iterable[int], *, again: bool) -> None:
        """Note, from inside of a backward, that it was given gradients of these outputs; `again` if one ran before."""
        if self.seen is None or not self.seen.issuperset(outputs):
            self.seen = (self.seen or set()).union(outputs)
        retained = again or self.needs.retained or keeps_graph()
        needs = Needs(retained, autocast_dtype(self.device_type) if ANY_AUTOCAST() else None)
        if needs != self.needs:
            self.needs = needs


# True if the backward that runs now keeps what it reads. Private to torch; where it is absent, each may.
keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# Tells the backward that runs now from others. Private to torch, too; where it is absent, they look like one.
_number_of_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


@contextlib.contextmanager
def noted_calls(register: Callable[[Callable[..., None]], Any]) -> Iterator[list[Any]]:
    """Yield a list that each module or optimizer which this thread calls in here is added to.

    Args:
        register: registers a hook, which is called with what is called first, and returns its handle.
    """
    thread, found = threading.get_ident(), list[Any]()

    def hook(called: Any, *_: Any) -> None:
        if threading.get_ident() == thread:
            found.append(called)

    handle = register(hook)
    try:
        yield found
    finally:
        handle.remove()
