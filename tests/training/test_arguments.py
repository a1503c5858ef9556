"""What arguments are and how they lie: forward and backward graphs give eager's answers and gradients for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

WIDTH = 6


class Step(nn.Module):
    """Asks about its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        asked = (10 if x is y else 0) + isinstance(x, nn.Parameter) + 3 * x.is_contiguous()
        return self.linear(x) * y + asked * x


def wanting(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, requires_grad=True)


# Leaves of the caller's, and what of them is passed.
KINDS: dict[str, Callable[[torch.device], tuple[Tensor, ...]]] = {
    "one": lambda device: (wanting(device, 4, WIDTH),) * 2,
    "two": lambda device: (wanting(device, 4, WIDTH), wanting(device, 4, WIDTH)),
    "transposed": lambda device: (torch.randn(WIDTH, 4, device=device).t().requires_grad_(), wanting(device, 4, WIDTH)),
    "a parameter": lambda device: (
        nn.Parameter(torch.randn(4, WIDTH, device=device)),
        torch.randn(4, WIDTH).to(device),
    ),
    "one without a gradient": lambda device: (torch.randn(4, WIDTH, device=device),) * 2,
    "with gaps": lambda device: (
        torch.randn(4, 2 * WIDTH, device=device)[:, ::2].requires_grad_(),
        wanting(device, 4, 1),
    ),
}


def copied(args: tuple[Tensor, ...]) -> list[Tensor]:
    """Copy arguments with their strides, class and aliases."""
    copies = {}
    for arg in args:
        own = torch.empty_strided(arg.shape, arg.stride(), device=arg.device).copy_(arg.detach())
        plain = own.requires_grad_(arg.requires_grad)
        copies[id(arg)] = nn.Parameter(own.detach()) if isinstance(arg, nn.Parameter) else plain
    return [copies[id(arg)] for arg in args]


@pytest.mark.proofs
@pytest.mark.parametrize("other", [name for name in KINDS if name != "two"])
def test_arguments_of_each_kind_have_eagers_answers_and_gradients(device: torch.device, other: str) -> None:
    module = Step().to(device)
    model: Any = sg.wrap(module, training=True, capture_sizes=[4], progress=False)
    for name in ("two", other) * 2:
        for _ in range(4):
            args = KINDS[name](device)
            found = []
            for run, given in ((sg.unwrap(model), copied(args)), (model, list(args))):
                module.zero_grad()
                answer = run(*given)
                answer.square().sum().backward()
                found.append((answer, [arg.grad for arg in given], [weight.grad for weight in module.parameters()]))
            torch.testing.assert_close(found[1], found[0])
            assert found[1][0].stride() == found[0][0].stride()
    assert model.graph_stats.replays >= 8
