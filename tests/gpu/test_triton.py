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
    """A kernel that is tuned again for every number of elements, hence for every captured size."""

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


@triton.jit
def _count(counter, source, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    values = tl.load(counter + offsets, mask=inside) + tl.load(source + offsets, mask=inside)
    tl.store(counter + offsets, values, mask=inside)


class Counts(nn.Module):
    """Adds its input to another, which no operator of torch's writes to."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        y = x * 2
        _count[(triton.cdiv(x.numel(), 128),)](total, x, x.numel(), BLOCK=128)
        return y + total


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("upfront", [True, False])
def test_an_input_that_only_a_kernel_of_triton_writes_reaches_the_caller(verify: int, upfront: bool) -> None:
    dims = {"x": 0, "total": 0}
    model = sg.wrap(Counts().eval(), capture_sizes=[4, 8], progress=False, verify=verify, batch_dims=dims)
    with torch.inference_mode():
        total, expected = torch.zeros(8, 32, device="cuda"), torch.zeros(8, 32, device="cuda")
        if upfront:
            assert model.capture_graphs(torch.randn(8, 32, device="cuda"), torch.zeros_like(total)).failed == {}
        for rows in (8, 4, 8, 4, 8, 4, 8, 3, 5, 8, 3, 5, 8):
            x = torch.randn(rows, 32, device="cuda")
            expected[:rows] += x
            torch.testing.assert_close(model(x, total[:rows]), x * 2 + expected[:rows])
            torch.testing.assert_close(total, expected)
    assert model.graph_stats.replays >= 5


class Adds(nn.Module):
    """Adds an attribute, which no operator of torch's reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(4 * 32, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        _count[(triton.cdiv(x.numel(), 128),)](y, self.table, x.numel(), BLOCK=128)
        return y


def test_an_attribute_that_only_a_kernel_of_triton_reads_is_watched_and_kept_alive() -> None:
    module = Adds().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.inference_mode():
        for turn in range(12):
            if turn % 4 == 3:
                model.table = torch.randn(4 * 32, device="cuda")
            churned = [torch.full((4 * 32,), float("nan"), device="cuda") for _ in range(50)]
            x = torch.randn(4, 32, device="cuda")
            torch.testing.assert_close(model(x), x + module.table.view(4, 32))
            del churned
            torch.cuda.empty_cache()
    assert model.graph_stats.recaptures == 3
    assert model.graph_stats.replays >= 4


def test_a_tensor_that_no_kernel_is_passed_may_be_replaced_after_every_call() -> None:
    model = sg.wrap(Adds().eval(), capture_sizes=[4], progress=False)
    kept = []
    with torch.inference_mode():
        for _ in range(8):
            x = torch.randn(4, 32, device="cuda")
            torch.testing.assert_close(model(x), x + model.table.view(4, 32))
            model.last = torch.randn(4, device="cuda")
            kept.append(model.last)
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.replays >= 4


def test_attributes_that_nothing_reads_may_change_where_all_kernels_are_torchs() -> None:
    model = sg.wrap(nn.Sequential(nn.Linear(64, 64), nn.GELU()).to("cuda").eval(), capture_sizes=[4], progress=False)
    with torch.inference_mode():
        for _ in range(6):
            model.last = torch.randn(4, device="cuda")
            model(torch.randn(4, 64, device="cuda"))
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.replays >= 3
