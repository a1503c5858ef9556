"""Tensors without memory of their own, passed where captured calls had an ordinary one: eager's answer, with why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import simplegraph as sg
from simplegraph import Reason

ROWS = 4


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))  # tells the device

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        return x * 2 if other is None else (x * 2, other * 2)


def nested(device: torch.device, layout: torch.layout, sizes: tuple[int, ...] = (2, 3)) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that they are in development
        return torch.nested.nested_tensor([torch.randn(rows, 8, device=device) for rows in sizes], layout=layout)


def dense(device: torch.device) -> Tensor:
    return torch.randn(ROWS, 8, device=device)


ODD: dict[str, Callable[[torch.device], Tensor]] = {
    "meta": lambda device: torch.empty(ROWS, 8, device="meta"),
    "meta parameter": lambda device: nn.Parameter(torch.empty(ROWS, 8, device="meta"), requires_grad=False),
    "nested": lambda device: nested(device, torch.strided),
    "nested of as many": lambda device: nested(device, torch.strided, (1,) * ROWS),
    "jagged": lambda device: nested(device, torch.jagged),
    "sparse": lambda device: dense(device).to_sparse(),
    "sparse rows": lambda device: dense(device).to_sparse_csr(),
    "fake": lambda device: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(dense(device)),
}


def outcome(call: Callable[..., Any], *args: Tensor) -> Any:
    try:
        answer = call(*args)
    except Exception as error:
        return type(error)
    answer = answer[-1] if isinstance(answer, tuple) else answer
    return type(answer), answer.layout, answer.device.type, answer.dtype


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("odd", ODD)
def test_such_a_tensor_after_a_capture_runs_eagerly(device: torch.device, odd: str, first: bool, upfront: bool) -> None:
    module = Double().eval().to(device)
    model = sg.wrap(module, capture_sizes=[1, ROWS], progress=False)
    usual = (dense(device),) if first else (dense(device), dense(device))
    if upfront:
        model.capture_graphs(*usual)
    for _ in range(6):
        model(*usual)
        model(*(tensor[:1] for tensor in usual))
    replays = model.graph_stats.replays
    assert replays
    for _ in range(3):
        args = (*usual[1:], ODD[odd](device))
        expected = outcome(module, *args)
        assert outcome(model, *args) == expected
    assert model.graph_stats.replays == replays
    eager = model.graph_stats.eager
    assert eager[Reason.OPAQUE_ARGUMENT] + eager[Reason.WRONG_DEVICE] == 3
    answer = model(*usual)
    assert torch.equal(answer if first else answer[0], usual[0] * 2)
    assert model.graph_stats.replays == replays + 1


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("scheme", [torch.per_tensor_affine, torch.per_channel_affine])
def test_a_quantized_tensor_after_a_capture_runs_eagerly(scheme: torch.qscheme) -> None:
    class Dense(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.dequantize() * 2 if x.is_quantized else x * 2

    model, usual = sg.wrap(Dense().eval(), capture_sizes=[ROWS], progress=False), torch.randn(ROWS, 8)
    for _ in range(4):
        model(usual)
    if scheme is torch.per_tensor_affine:
        odd = torch.quantize_per_tensor(usual, 0.1, 0, torch.quint8)
    else:
        odd = torch.quantize_per_channel(usual, torch.ones(ROWS), torch.zeros(ROWS), 0, torch.qint8)
    assert torch.equal(model(odd), odd.dequantize() * 2)
    assert model.graph_stats.eager[Reason.OPAQUE_ARGUMENT] == 1


def test_such_a_tensor_after_a_training_capture_runs_eagerly(device: torch.device) -> None:
    module = nn.Linear(8, 8).to(device)
    model = sg.wrap(module, training=True, capture_sizes=[ROWS], progress=False)
    for _ in range(5):
        model(dense(device)).sum().backward()
    assert model.graph_stats.replays
    for odd in ODD:
        args = ODD[odd](device)
        assert outcome(model, args) == outcome(module, args)
