"""An eager break of a padded batch is passed the real rows and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.graph.breaks.models import graphs, piecewise

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]

WIDTH = 6


def write(h: Tensor, out: Tensor) -> None:
    out.copy_(h.softmax(0))


def into_new_memory(broken: Callable[..., Any], h: Tensor) -> Tensor:
    out = torch.empty_like(h)
    broken(h, out)
    return out


def looked_up(broken: Callable[..., Any], h: Tensor) -> Tensor:
    places = torch.empty(len(h), dtype=torch.long, device=h.device)  # garbage here would be out of range
    broken(h, places)
    return h + torch.arange(8.0, device=h.device)[places, None]


# What a break computes, and how the forward calls it.
SERVED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "decides by a sum": (lambda h: h * (2.0 if h.sum().item() > 0 else 0.5), lambda f, h: f(h)),
    "counts rows": (lambda h: h * h.shape[0], lambda f, h: f(h)),
    "mixes rows": (lambda h: h.softmax(0), lambda f, h: f(h)),
    "flips rows": (lambda h: h.flip(0), lambda f, h: f(h)),
    "reduces": (lambda h: h.mean(0), lambda f, h: h + f(h)),
    "writes": (write, into_new_memory),
    "writes in place": (lambda h: h.sub_(h.sum(0)), lambda f, h: (f(h), h)[1] * 1),
    "writes indices": (lambda h, out: out.copy_(h.argmax(1)), looked_up),
    "returns its argument": (lambda h: h.mul_(h.shape[0]), lambda f, h: f(h) + 1),
    "returns a view": (lambda h: h.mul_(len(h))[:, 1:4], lambda f, h: f(h).sum(1, keepdim=True) + h),
    "is passed a transposed tensor": (lambda h: h.softmax(1), lambda f, h: f(h.t()).t()),
    "is passed columns": (lambda h: h.softmax(0), lambda f, h: f(h[:, 1:4]).repeat(1, 2)),
    "is passed a list": (lambda both: both[0] + both[1].sum(), lambda f, h: f([h, h * 2])),
}
EXACT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "is passed flat rows": (lambda h: h * len(h), lambda f, h: f(h.reshape(-1)).reshape(-1, WIDTH)),
    "is passed inner rows": (lambda h: h.softmax(1), lambda f, h: f(h.t().contiguous()).t()),
    "is passed flipped rows": (lambda h: h * h.shape[0], lambda f, h: f(h.flip(0)).flip(0)),
    "is passed a count": (lambda h, rows: h * rows, lambda f, h: f(h, len(h))),
    "returns a count": (lambda h: len(h), lambda f, h: h * f(h)),
    "returns pairs of rows": (lambda h: h @ h.t(), lambda f, h: f(h).softmax(-1) @ h),
}


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any], use: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.broken, self.use = sg.eager_break(function), use

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.use(self.broken, self.first(x)))


def padded_replays(function: Callable[..., Any], use: Callable[..., Any], device: torch.device) -> tuple[int, Any]:
    module = Calling(function, use)
    model = piecewise(module, device, capture_sizes=[4, 8])
    for index in range(60):
        x = torch.randn(3 + index % 4, WIDTH, device=device)
        with sg.eager():
            expected = model(x)
        torch.testing.assert_close(model(x), expected)
    return sum(sum(graph.paddings[1:]) for graph in graphs(model)), model


@pytest.mark.parametrize("kind", SERVED)
def test_a_break_of_a_padded_batch_sees_the_real_rows(device: torch.device, kind: str) -> None:
    replays, _ = padded_replays(*SERVED[kind], device)
    assert replays > 30


@pytest.mark.parametrize("kind", EXACT)
def test_rows_that_cannot_be_cut_mean_exact_sizes(device: torch.device, kind: str) -> None:
    replays, model = padded_replays(*EXACT[kind], device)
    assert replays == 0
    assert model.graph_stats.replays > 5, "exact sizes"
    assert model.graph_stats.eager[sg.Reason.PADDING_SHOWS] > 20


def test_a_break_that_declares_padding_sees_padding_rows(device: torch.device) -> None:
    seen: list[int] = []

    @sg.eager_break(padded=True)
    def attend(h: Tensor, out: Tensor) -> None:
        seen.append(len(h))
        out.copy_(h)

    class Attending(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            attend(h, out := torch.zeros_like(h))
            return out + 1

    model = piecewise(Attending(), device, capture_sizes=[4])
    for rows in (4, 4, 3, 3, 3, 3):
        x = torch.randn(rows, WIDTH, device=device)
        torch.testing.assert_close(model(x), x * 2 + 1)
    assert seen[-1] == 4


def test_a_tagged_operator_sees_padding_rows_as_it_is_planned_for_them(device: torch.device) -> None:
    seen: list[int] = []
    with torch.library._scoped_library("sgrows", "FRAGMENT") as library:
        library.define("attend(Tensor h) -> Tensor", tags=[torch.Tag.cudagraph_unsafe])
        library.impl("attend", lambda h: (seen.append(len(h)), h * 1)[1], device.type.upper())

        class Attending(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                found: Tensor = torch.ops.sgrows.attend(x * 2)
                return found + 1

        model = piecewise(Attending(), device, capture_sizes=[4])
        for rows in (4, 4, 3, 3, 3, 3):
            x = torch.randn(rows, WIDTH, device=device)
            torch.testing.assert_close(model(x), x * 2 + 1)
    assert seen[-1] == 4
    assert model.graph_stats.padded_tokens > 0
