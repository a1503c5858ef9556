"""Functions of a module and its inputs that use what torch runs otherwise than its own plain operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention import flex_attention as flex

WIDTH, LENGTH = 8, 16


class Using(nn.Module):
    """Calls a function of itself and its input of (rows, WIDTH)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("calls", torch.zeros(WIDTH))
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))
        self.register_buffer("lengths", torch.tensor([LENGTH // 2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def heads(m: Any, x: Tensor) -> Tensor:
    """(rows, 2, LENGTH, WIDTH)."""
    return (x @ m.weight)[:, None, None, :] * m.table.expand(2, LENGTH, WIDTH)


def flex_score(m: Any, x: Tensor) -> Tensor:
    q = heads(m, x)
    return flex.flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))  # type: ignore[return-value]


def flex_captured_table(m: Any, x: Tensor) -> Tensor:
    """The score's function reads a buffer, which no argument of the operator names."""
    q = heads(m, x)
    return flex.flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score * m.table[i, h])  # type: ignore[return-value]


def flex_mask(m: Any, x: Tensor) -> Tensor:
    if "mask" not in vars(m):
        with torch.inference_mode(False):
            blocks = flex.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device=str(x.device), BLOCK_SIZE=LENGTH
            )
        vars(m)["mask"] = blocks
    q = heads(m, x)
    return flex.flex_attention(q, q, q, block_mask=m.mask)  # type: ignore[return-value]


def cond(m: Any, x: Tensor) -> Tensor:
    y: Tensor = torch.cond(x.sum() > 0, lambda x: x @ m.weight, lambda x: x - 1, (x,))
    return y


def loop(m: Any, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x @ m.weight), (start, x))[1]  # type: ignore[no-any-return]


@torch.library.custom_op("simplegraph_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("simplegraph_tests::count_rows", mutates_args=("seen",))
def count_rows(x: Tensor, seen: Tensor) -> None:
    seen.add_(x.shape[0])


@torch.library.custom_op("simplegraph_tests::through_numpy", mutates_args=())
def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(numpy.square(x.detach().cpu().numpy())).to(x.device)


def custom_writing(m: Any, x: Tensor) -> Tensor:
    count_rows(x, m.calls)
    return x @ m.weight + m.calls


def custom_in_place(m: Any, x: Tensor) -> Tensor:
    """It writes to the caller's tensor."""
    count_rows(x.clone(), x)
    return x @ m.weight


def _scripted(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight
    for _ in range(2):
        y = y.tanh() * 2.0 + y.size(0)
    return y


def _scripted_number(x: Tensor) -> Tensor:
    return x * torch.tensor(0.5, device=x.device) + torch.arange(x.size(1), device=x.device)


def _scripted_branch(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x - 1


def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Script it at the first call, in inference mode or not."""
    made: list[Any] = []

    def call(*args: Any) -> Tensor:
        if not made:
            made.append(torch.jit.script(function))
        return made[0](*args)  # type: ignore[no-any-return]

    return call


_script, _script_number, _script_branch = map(scripted, (_scripted, _scripted_number, _scripted_branch))

# A graph holds these on any device.
CAPTURED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "flex_attention with a score": flex_score,
    "flex_attention with a buffer in its score": flex_captured_table,
    "flex_attention with a block mask": flex_mask,
    "a custom operator": lambda m, x: twice(x) @ m.weight,
    "a custom operator that writes to a buffer": custom_writing,
    "a custom operator that writes to the input": custom_in_place,
    "a scripted function": lambda m, x: _script(x, m.weight),
}
# These read a value back to Python, where their operator is not one of a graph.
READING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "torch.cond": cond,
    "while_loop": loop,
    "a custom operator in NumPy": lambda m, x: through_numpy(x) + 1,
    "a scripted function with a branch": lambda m, x: _script_branch(x),
}
# These make tensors where no mode sees Python do so.
HIDDEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a number in a scripted function": lambda m, x: _script_number(x @ m.weight),
}
