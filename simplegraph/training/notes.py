"""Notes of eager calls under grad mode and their backwards, which captures follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.modes import ANY_AUTOCAST, autocast_dtype
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.guard.torch_state import GLOBAL_BACKWARD_HOOKS, GLOBAL_BACKWARD_PRE_HOOKS, autograd_hindrance


class OutputLook(NamedTuple):
    """The layout of an output.

    Attributes:
        wanting: True if it requires gradients.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wanting: bool

    def buffer(self) -> Tensor:
        """Make a buffer for its gradient."""
        with torch.inference_mode(False), torch.no_grad():
            dense = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
            return torch.zeros_like(dense)


def look_at(outputs: Sequence[Tensor]) -> list[OutputLook]:
    """Return the layouts of outputs."""
    return [OutputLook(out.shape, out.stride(), out.dtype, out.device, out.requires_grad) for out in outputs]


class Needs(NamedTuple):
    """The needs of a backward: True if it keeps saved tensors (retain_graph), and the dtype of autocast around it."""

    retained: bool = False
    autocast: torch.dtype | None = None


class BackwardNotes:
    """Keeps notes of the eager calls of one signature, and of their backwards.

    Attributes:
        device_type: the type of the device that they ran on.
        outputs: the layouts of the outputs of the last call.
        seen: the numbers of outputs that backwards were given gradients of; None before the first backward.
        calls_before: calls after the first one that ran before the first backward.
        twice: True if a backward is to be differentiated itself.
        needs: the needs of the last backward, and `retained` if any backward kept saved tensors; graphs of backwards
            differ by these.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.outputs: list[OutputLook] = []
        self.seen: set[int] | None = None
        self.calls_before = 0
        self.twice = False
        self.needs = Needs()

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Note the outputs of an eager call, and later its backward."""
        self.outputs = look_at(outputs)
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
        """Note, inside a backward, the outputs that it is given gradients of; `again` if another ran before."""
        self.seen = {*(self.seen or ()), *outputs}
        retained = again or self.needs.retained or keeps_graph()
        self.needs = Needs(retained, autocast_dtype(self.device_type) if ANY_AUTOCAST() else None)


# True if the running backward keeps saved tensors. Private to torch; without it, every backward is assumed to.
keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
# The number of the running backward. Private to torch, too; where it is absent, all backwards look like one.
_number_of_backward: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def refuse_hooks(module: nn.Module) -> None:
    """Refuse a module whose backward runs Python code that a replay would not. Raises CannotBind."""
    if (hindered := autograd_hindrance()) is not None:
        raise CannotBind(*hindered)
    if GLOBAL_BACKWARD_HOOKS or GLOBAL_BACKWARD_PRE_HOOKS:
        raise CannotBind(Reason.HOOKS, "backward hooks on all modules")
    for name, child in module.named_modules():
        if child._backward_hooks or child._backward_pre_hooks:
            raise CannotBind(Reason.HOOKS, f"full backward hooks on {name or 'the module'}")


class HookWatch(torch.overrides.TorchFunctionMode):
    """Notices hooks that a forward registers on its own tensors: a replay would not call them.

    Attributes:
        method: the method that it called; None if it called none.
    """

    _METHODS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})
    method: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.__name__ in self._METHODS:
            self.method = f"Tensor.{func.__name__}"
        return func(*args, **(kwargs or {}))
