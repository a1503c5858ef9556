"""Triton kernels in a captured forward: compiled and tuned on first use, which a capture does not permit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["count"])
@triton.jit
def _scale(source, target, factor, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    tl.store(target + offsets, tl.load(source + offsets, mask=inside) * factor, mask=inside)


class Scale(nn.Module):
    """Tuned anew for every number of elements, hence for every captured size."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        count = x.numel()
        _scale[lambda meta: (triton.cdiv(count, meta["BLOCK"]),)](x, y, 3.0, count)
        return y + 1


@pytest.mark.parametrize("width", [40, 56])
def test_a_kernel_that_tunes_itself_is_captured_up_front_at_every_size(width: int) -> None:
    model = sg.wrap(Scale().eval(), capture_sizes=[1, 3, 8, 16], progress=False)
    with torch.inference_mode():
        summary = model.capture_graphs(torch.randn(2, width, device="cuda"))
        assert summary.failed == {}
        assert summary.captured == 4
        for rows in (16, 1, 3, 2, 8, 11):
            x = torch.randn(rows, width, device="cuda")
            torch.testing.assert_close(model(x), x * 3 + 1)
    assert model.graph_stats.replays == 6
    assert not model.graph_stats.eager
    assert torch.rand(3, device="cuda").max() < 1


def test_a_kernel_that_tunes_itself_is_captured_lazily() -> None:
    model = sg.wrap(Scale().eval(), capture_sizes=[1, 3, 8, 16], progress=False)
    with torch.inference_mode():
        for _ in range(4):
            for rows in (16, 1, 3, 2, 8, 11):
                x = torch.randn(rows, 72, device="cuda")
                torch.testing.assert_close(model(x), x * 3 + 1)
    assert model.graph_stats.captures == 4
    assert model.graph_stats.replays >= 12
    assert model.graph_stats.failures == {}
