"""Reading a value back to Python during a capture is an error at the line that does it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simplegraph.base.errors import EmulatorError
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import GRAD_MODES, READ_BACK, assert_same, capture

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "format": lambda x: f"{x[0]:.2f}",
    "equal": lambda x: torch.equal(x, x + 0),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask_set": lambda x: x.clone().index_put_((x > 0,), x[:1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "one_hot": lambda x: F.one_hot(x.long()),
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "inverse": lambda x: torch.linalg.inv(torch.diag(x)),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "print": lambda x: print(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to_device": lambda x: x.to(device="cpu"),
}


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("name", READS)
def test_a_read_back_fails_at_the_line_that_does_it(pool: GraphPool, name: str, grad_mode: Any) -> None:
    x = torch.ones(3)
    with pytest.raises(EmulatorError, match=READ_BACK) as caught, grad_mode():
        capture(pool, lambda: READS[name](x + 1))
    lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any(f'"{name}": lambda' in line for line in lines)


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
def test_what_needs_no_value_is_captured(pool: GraphPool, grad_mode: Any) -> None:
    x, index = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0, 1, 1])

    def forward() -> list[Tensor]:
        filled = x.clone()
        filled[x < 0] = 0.0
        repeated = x.repeat_interleave(index, output_size=2)
        return [filled, repeated, F.one_hot(index, 3), x.to(index.device), x[index], x[0], x[None, ::2], x.argsort()]

    with grad_mode():
        segment, outputs = capture(pool, forward)
        x.add_(1)
        index.copy_(torch.tensor([1, 0, 1]))
        segment.replay()
        assert_same(outputs, forward())


HOST_DATA: dict[str, Callable[[Tensor], object]] = {
    "list": lambda x: x + torch.tensor([1.0, 2.0]),
    "list_index": lambda x: x[[0, 1]],
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "array": lambda x: x + torch.from_numpy(np.ones(2)),
    "scalar_to_device": lambda x: torch.tensor(1.0, device=x.device),
    "pin": lambda x: torch.empty(2, pin_memory=True),
}


@pytest.mark.parametrize("name", HOST_DATA)
def test_data_from_the_host_cannot_be_captured(pool: GraphPool, name: str) -> None:
    x = torch.ones(2)
    with pytest.raises(EmulatorError, match="pinned"):
        capture(pool, lambda: HOST_DATA[name](x))


def test_a_swallowed_read_back_still_breaks_the_capture(pool: GraphPool) -> None:
    x = torch.ones(2)

    def forward() -> Tensor:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x * 2

    with pytest.raises(EmulatorError, match=r"broken earlier: Python read back .*aten\.item"):
        capture(pool, forward)
