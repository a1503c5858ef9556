"""The node of the caller's autograd graph that stands for a call whose forward and backward are graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

# As torch says it of a node that saves tensors, which would cost more than to remember it.
_RELEASED = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved "
    "tensors after calling backward."
)


class GraphedCall(torch.autograd.Function):
    """Runs a `PairReplay`: its forward, and later its backward, as torch's engine reaches it."""

    @staticmethod
    def forward(ctx: Any, replay: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run a replay's forward; `leaves` are what its gradients flow to."""
        outputs = replay.forward()
        ctx.replay = replay
        ctx.materialize_grads = False  # what `set_materialize_grads` sets
        constant = replay.plan.constant
        if constant:
            ctx.mark_non_differentiable(*(outputs[number] for number in constant))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the replay's backward."""
        replay = ctx.replay
        if replay.released and any(grads[number] is not None for number in replay.released):
            raise RuntimeError(_RELEASED)
        if all(grad is None for grad in grads):  # what follows needs none of them, nor does eager make any then
            return None, *(None for _ in replay.plan.leaves)
        return None, *replay.backward(grads)


# Past the Python of `Function.apply`, which looks at each argument for functorch: no such call comes here.
apply: Callable[..., Any] = super(torch.autograd.Function, GraphedCall).apply
# Likewise past the Python that looks for the way in which a function of any kind is written.
cast(Any, GraphedCall)._backward_cls.apply = GraphedCall.backward
