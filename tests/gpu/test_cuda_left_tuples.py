"""States that a forward leaves in a tuple, on a real GPU: eager's numbers, in memory that no replay writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.gpu.modules import poison

pytestmark = pytest.mark.usefixtures("device_works")
WIDTH = 64


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        return self.state[0] * 2


class Layers(nn.Module):
    """Two layers of cuDNN's LSTM, whose state has the batch second."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y, self.state = self.lstm(x[:, None], self.state)
        return y[:, 0] * 2


@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("kind", [Cell, Layers])
def test_a_state_in_a_tuple_is_eagers_after_resets_and_stays_as_it_was(kind: type[Any], outputs: str) -> None:
    torch.manual_seed(0)
    module = kind().to("cuda").eval()
    twin = copy.deepcopy(module)
    model: Any = sg.wrap(module, capture_sizes=[4], outputs=outputs, progress=False)
    kept: list[tuple[Any, Any]] = []
    for call in range(36):
        if call % 12 == 0:
            module.state = twin.state = None
        x = torch.randn(4, WIDTH, device="cuda")
        actual, expected = model(x), twin(x)
        torch.testing.assert_close(actual, expected)
        kept.append((module.state, twin.state))
        if call != 35:
            poison(model)
    assert model.graph_stats.replays >= 24
    assert not model.graph_stats.failures
    manager = model.graph_manager
    for own, expected in kept:
        assert type(own) is tuple
        torch.testing.assert_close(own, expected)
        assert not any(manager.device.in_pool(manager.pool, tensor) for tensor in own)


def test_states_of_padded_batches_have_their_rows() -> None:
    torch.manual_seed(0)
    module = Cell().to("cuda").eval()
    twin = copy.deepcopy(module)
    model: Any = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    for rows in (8, 4, 3, 5, 7, 3):
        module.state = twin.state = None
        for _ in range(8):
            x = torch.randn(rows, WIDTH, device="cuda")
            torch.testing.assert_close(model(x), twin(x))
            torch.testing.assert_close(module.state, twin.state)
            poison(model)
    assert model.graph_stats.replays >= 16
