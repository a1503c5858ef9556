"""The way of calls that no graph serves for a reason that stays: known at once, and run with nothing around them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor

from simplegraph.graph.device import GraphDevice
from simplegraph.graph.tensors import memory_order
from simplegraph.module.args import PLAIN_TENSORS, ConstantArg
from simplegraph.module.call import Call
from simplegraph.module.functions import computes_gradients
from simplegraph.module.state import CapturedState, any_requires_grad
from simplegraph.reasons import CannotBind, Reason

_NOTHING: tuple[list[Tensor], list[Tensor]] = ([], [])
# They stay while nothing more is learnt of the module: no reason that is about the memory of one call.
_LASTING = frozenset(
    {
        *(Reason.CAPTURE_FAILED, Reason.NOT_CAPTURED_UPFRONT, Reason.UNSUPPORTED_OUTPUT, Reason.CHANGED_ARGUMENTS),
        *(Reason.OUTPUT_SHAPE_UNKNOWN, Reason.BATCH_DIM_UNCONFIRMED, Reason.PADDING_SHOWS, Reason.RANDOM_PADDING),
    }
)


class Learner(Protocol):
    """Owns the graphs of a module, and learns of it what they need.

    Attributes:
        state: what they read of it; None if there are none.
        lessons: how often there was something to learn of it.
    """

    state: CapturedState | None
    lessons: int


def remember(call: Call, why: CannotBind, device: GraphDevice, owner: Learner) -> None:
    """Give the reason its size, and the call's layout a plan if the reason stays."""
    why.size = call.batch
    if why.reason in _LASTING:
        call.layout.plans[call.plan_key] = EagerPlan(call, why, device, owner)


class _Unlocked:
    """Stands for a pool: other threads may replay while the module runs eagerly."""

    lock = contextlib.nullcontext()


class _Lesson:
    """Stands for a graph, which is good for as long as its owner learns nothing more."""

    def __init__(self, owner: Learner) -> None:
        self._owner, self._number = owner, owner.lessons

    @property
    def left(self) -> bool:
        return self._owner.lessons == self._number


class EagerPlan:
    """Stands among a layout's plans for a batch size that no graph serves; replaying it raises why not.

    It lets such a call be told from others as fast as one that is replayed. It is asked what a `Plan` is asked.

    Args:
        call: one of these calls; why: why they run eagerly.
        device: where graphs would be.
        owner: of the graphs of other sizes. The plan is good for as long as nothing is learnt there.
    """

    guarded = False
    debug = False
    pool = _Unlocked()

    def __init__(self, call: Call, why: CannotBind, device: GraphDevice, owner: Learner) -> None:
        self.device, self.device_type = device, device.torch_device.type
        self.is_capturing = device.is_capturing
        self.padding = call.padding
        self.state = owner.state or _NoGraphs(call)
        self.graph = _Lesson(owner)
        self._why = why.reason, why.detail, why.size
        pairs = zip(call.leaves, call.layout.args, strict=True)
        self._expected: list[tuple[Any, ...]] = [
            (arg, None, None, 0, (), None)
            if isinstance(arg, ConstantArg)
            else (arg, leaf.shape, leaf.dtype, leaf.get_device(), leaf.stride(), arg.address)
            for leaf, arg in pairs
        ]

    def bind(self, leaves: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return that nothing has to be copied; None if a leaf is not what such a call passes."""
        for leaf, (arg, shape, dtype, index, stride, address) in zip(leaves, self._expected, strict=True):
            if shape is None:
                if not arg.holds(leaf):
                    return None
            elif (
                leaf.__class__ not in PLAIN_TENSORS
                or leaf.dtype is not dtype
                or leaf.shape != shape
                or leaf.get_device() != index
                or (leaf.stride() != stride and memory_order(leaf) != arg.order)
                or (address is not None and leaf.data_ptr() != address)
            ):
                return None
        return _NOTHING

    def replay(self, leaves: Sequence[Any], copies: Any) -> NoReturn:
        """Raise CannotBind, as reading the whole call would."""
        raise CannotBind(*self._why)


class _NoGraphs:
    """Stands for the state that graphs read where there are none. It says whether a call wants gradients.

    Where it misses that, as for a tensor that no module registers, the call is counted under another reason.
    """

    def __init__(self, call: Call) -> None:
        # Not of parameters: torch refuses to swap a tensor that somebody refers to weakly.
        modules = () if computes_gradients(call.module) else call.module.modules()
        self._holders = [weakref.ref(module) for module in modules if module._parameters]

    def wants_grad(self) -> bool:
        """True if eager would build an autograd graph, or if somebody has to look first."""
        modules = [holder() for holder in self._holders]
        return any(module is None or any_requires_grad(module._parameters.values()) for module in modules)

    def moved(self) -> bool:
        """Return False: nothing was read."""
        return False
