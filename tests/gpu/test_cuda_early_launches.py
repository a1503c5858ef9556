"""Our kernels are launched before what they read is there: right after work of any kind, eagerly and in graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from simplegraph.device.cuda.driver import cuda_driver
from simplegraph.fused.choice import chosen_operators
from simplegraph.fused.torch_operators import Operators

pytest.importorskip("triton")
ROWS, COLUMNS = 64, 1024
PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
Write = Callable[[Tensor, Tensor], object]


def slowly() -> None:
    torch.cuda._sleep(300_000)  # a tenth of a millisecond: whatever does not wait reads what was there before


def kernel(x: Tensor, new: Tensor) -> None:
    slowly()
    torch.add(new, 0, out=x)


def copy(x: Tensor, new: Tensor) -> None:
    slowly()
    x.copy_(new)


def memset_and_kernel(x: Tensor, new: Tensor) -> None:
    slowly()
    x.zero_()
    x += new


def memset_of_the_last(x: Tensor, new: Tensor) -> None:
    torch.add(new, 0, out=x)
    slowly()
    x[-1].zero_()


def product(x: Tensor, new: Tensor) -> None:
    slowly()
    torch.mm(torch.eye(ROWS, device=x.device), new, out=x)


def other_stream(x: Tensor, new: Tensor) -> None:
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        kernel(x, new)
    here.wait_stream(there)


def both_streams(x: Tensor, new: Tensor) -> None:
    here, there = torch.cuda.current_stream(), torch.cuda.Stream()
    there.wait_stream(here)
    with torch.cuda.stream(there):
        slowly()
        x[: ROWS // 2].copy_(new[: ROWS // 2])
    torch.add(new[ROWS // 2 :], 0, out=x[ROWS // 2 :])
    here.wait_stream(there)


WRITES: list[Write] = [kernel, copy, memset_and_kernel, memset_of_the_last, product, other_stream, both_streams]


def run(operators: Operators, write: Write, x: Tensor, new: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Write x, run three kernels one after the other, and overwrite what they read."""
    write(x, new)
    gated = operators.gated(x, weight.expand_as(x).contiguous(), "silu")
    normed, total = operators.add_rms_norm(gated, x, weight, 1e-5)
    x.fill_(float("nan"))
    gated.mul_(2)
    return gated, normed, total


@pytest.mark.parametrize("write", WRITES)
def test_kernels_wait_for_what_they_read_and_what_follows_waits_for_them(write: Write) -> None:
    x, new = torch.zeros(ROWS, COLUMNS, device="cuda"), torch.randn(ROWS, COLUMNS, device="cuda")
    weight, operators = torch.randn(COLUMNS, device="cuda"), chosen_operators(triton=True)
    run(operators, write, x, new, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(operators, write, x, new, weight)
    for _ in range(10):
        new.normal_()
        expected = run(Operators(), write, torch.empty_like(x), new, weight)
        for each in captured:
            each.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(captured, expected)
        torch.testing.assert_close(run(operators, write, torch.empty_like(x), new, weight), expected)


def test_a_graph_of_our_kernels_starts_each_before_the_last_has_ended() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the GPU has no programmatic launches")
    x, weight = torch.randn(4, COLUMNS, device="cuda"), torch.randn(COLUMNS, device="cuda")
    operators = chosen_operators(triton=True)
    operators.rms_norm(x, weight, 1e-5)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(4):
            x = operators.rms_norm(x, weight, 1e-5)
    assert edges(graph.raw_cuda_graph()).count(PROGRAMMATIC) == 3


def edges(graph: int) -> list[int]:
    """List the types of a graph's edges."""
    driver, handle, count = cuda_driver(), ctypes.c_void_p(graph), ctypes.c_size_t()
    assert driver.cuGraphGetEdges_v2(handle, None, None, None, ctypes.byref(count)) == 0
    starts, targets, data = ((ctypes.c_uint64 * count.value)() for _ in range(3))
    assert driver.cuGraphGetEdges_v2(handle, starts, targets, data, ctypes.byref(count)) == 0
    return [each >> 16 & 0xFF for each in data]  # from_port, to_port, type
