"""Graphs beside what else goes on in torch's allocator on a real GPU: pools, backends, workspaces, released memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.cuda.device import CudaDevice
from simplegraph.device.protocol import GraphPool
from tests.gpu.captures import MIB, capture

pytestmark = pytest.mark.usefixtures("device_works")


def run(script: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# Whose memory it is.


def test_memory_allocated_after_somebody_asked_in_the_capture_is_the_pools(cuda: CudaDevice, pool: GraphPool) -> None:
    x = torch.ones(8, device="cuda")

    def forward() -> list[Tensor]:
        made = []
        for size in (8 * MIB, 16 * MIB, 24 * MIB):  # each in a segment of its own
            made.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))
            assert cuda.in_pool(pool, made[-1])
            assert not cuda.in_pool(pool, x)
        return [*made, torch.zeros(40 * MIB, dtype=torch.uint8, device="cuda")]

    _, outputs = capture(cuda, pool, forward)
    assert [cuda.in_pool(pool, output) for output in outputs] == [True] * 4
    assert not cuda.in_pool(pool, x)


@sg.eager_break
def _two_results(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x + 1


class Broken(nn.Module):
    """Every result of its break, and its output, lies in a segment of the allocator's own."""

    def forward(self, x: Tensor) -> Tensor:
        double, more = _two_results(x + 0)
        return double + more


ROWS, WIDTH = 8, MIB  # 32 MiB of float32


def test_outputs_of_two_calls_are_two_tensors_after_breaks_with_large_results() -> None:
    model = sg.wrap(Broken().eval(), capture_sizes=[ROWS], mode="PIECEWISE", progress=False)
    outputs = [model(torch.full((ROWS, WIDTH), float(turn), device="cuda")) for turn in range(5)]
    assert model.graph_stats.replays >= 2
    assert len({output.data_ptr() for output in outputs}) == 5
    assert [output.unique().tolist() for output in outputs] == [[3.0 * turn + 1] for turn in range(5)]


def test_smaller_sizes_reuse_what_breaks_of_larger_ones_return() -> None:
    def grown(sizes: list[int]) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        model = sg.wrap(Broken().eval(), capture_sizes=sizes, mode="PIECEWISE", progress=False)
        assert model.capture_graphs(torch.zeros(ROWS, WIDTH, device="cuda")).failed == {}
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    one = grown([ROWS])
    assert grown([ROWS, ROWS - 2, ROWS - 4]) <= one + 16 * MIB


# Memory pools and allocators of the user's.


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


@pytest.mark.parametrize("upfront", [True, False])
def test_a_capture_inside_the_users_memory_pool_has_its_memory_in_the_graphs_pool(upfront: bool) -> None:
    module, x = Chain().to("cuda").eval(), torch.randn(8, 512, device="cuda")
    model: Any = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    users = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(users):
        if upfront:
            assert model.capture_graphs(x).failed == {}
        kept = [model(x) for _ in range(4)]
        inside = torch.zeros(MIB, device="cuda")
    graphs, pool = model.graph_manager.device, model.graph_manager.pool
    for program in model.graph_manager.programs.values():
        assert all(graphs.in_pool(pool, output) for output in program.outputs)
    everything = torch.cuda.memory.memory_snapshot()
    addresses = [(each["address"], each["total_size"]) for each in everything if each["segment_pool_id"] == users.id]
    assert any(start <= inside.data_ptr() < start + size for start, size in addresses)  # it is the user's again
    del kept
    with torch.cuda.use_mem_pool(users):
        churned = [torch.full((size, 512), float("nan"), device="cuda") for size in (1, 4, 8, 8, 64)]
        for _ in range(3):
            x = torch.randn(8, 512, device="cuda")
            torch.testing.assert_close(model(x), module(x))
        assert all(bool(each.isnan().all()) for each in churned)
    assert model.graph_stats.replays >= 4


SERVE = """
import gc
import torch
import simplegraph as sg
from torch import nn

torch.set_grad_enabled(False)
torch.manual_seed(0)
module = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to("cuda").eval()
model = sg.wrap(module, capture_sizes=[1, 8, 64], progress=False)

def serve(turns):
    kept = []
    for turn in range(turns):
        x = torch.randn((64, 8, 1, 5, 33)[turn % 5], 1024, device="cuda")
        kept.append((model(x), module(x)))
        churn = [torch.full((rows, 1024), float("nan"), device="cuda") for rows in (1, 8, 64, 512)]
        if turn % 7 == 6:
            del churn
            gc.collect()
            torch.cuda.empty_cache()
    for output, expected in kept:
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-3)
"""


def test_an_allocator_that_cannot_tell_whose_memory_is_whose_is_refused_with_the_reason() -> None:
    script = """
serve(20)
assert model.graph_stats.replays == 0
assert set(model.graph_stats.eager) == {sg.Reason.ALLOCATOR}, model.graph_stats.eager
for use in (lambda: sg.CudaGraphManager(device="cuda"), lambda: model.capture_graphs(torch.zeros(1, 1024).cuda())):
    try:
        use()
    except sg.SimpleGraphError as error:
        assert "allocator" in str(error), error
    else:
        raise AssertionError
"""
    run(SERVE + script, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")


@pytest.mark.parametrize("conf", ["expandable_segments:True", "expandable_segments:True,max_split_size_mb:64"])
def test_graphs_live_in_expandable_segments(conf: str) -> None:
    script = """
serve(40)
assert model.graph_stats.replays >= 25
model.reset_graphs()
assert model.capture_graphs(torch.randn(64, 1024, device="cuda")).failed == {}
serve(40)
static = sg.wrap(module, capture_sizes=[64], outputs="static", progress=False)
for _ in range(3):
    x = torch.randn(64, 1024, device="cuda")
    output = static(x)
static.reset_graphs()
gc.collect()
torch.cuda.empty_cache()
torch.testing.assert_close(output, module(x), rtol=1e-3, atol=1e-3)
"""
    run(SERVE + script, PYTORCH_CUDA_ALLOC_CONF=conf)


# Workspaces of cuBLAS, which graphs go on using.


SPLIT = """
import gc
import torch
import simplegraph as sg
from torch import nn

torch.set_grad_enabled(False)
torch.manual_seed(0)

class Split(nn.Module):
    # Long inner dimensions and few outputs: cuBLAS splits them, and adds the parts up in its workspace.
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(16384, 64, bias=False), nn.Linear(16384, 64)

    def forward(self, x):
        return self.down(x) + self.up(x)

module = Split().to("cuda", torch.bfloat16).eval()
model = sg.wrap(module, capture_sizes=[16], progress=False)
inputs = [torch.randn(16, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
expected = [module(x) for x in inputs]
for x in inputs:
    model(x)
"""


def test_graphs_replay_right_after_the_workspaces_were_cleared() -> None:
    script = """
for turn in range(3):
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((size,), 7.0, device="cuda") for size in (1 << 18, 1 << 20, 1 << 23, 1 << 23, 1 << 23)]
    for x, wanted in zip(inputs, expected):
        torch.testing.assert_close(model(x), wanted, rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    assert all(bool((each == 7.0).all()) for each in others), "a graph wrote into somebody else's memory"
assert model.graph_stats.replays >= 12
"""
    run(SPLIT + script)


def test_a_module_compiled_with_graphs_of_its_own_does_no_harm_beside_ours() -> None:
    script = """
compiled = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()).to("cuda").eval(), mode="reduce-overhead")
plain = compiled._orig_mod
for turn in range(6):
    for rows in (4, 8):
        y = torch.randn(rows, 64, device="cuda")
        torch.testing.assert_close(compiled(y).clone(), plain(y), rtol=1e-3, atol=1e-3)
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((size,), 7.0, device="cuda") for size in (1 << 20, 1 << 23, 1 << 23)]
    for x, wanted in zip(inputs, expected):
        torch.testing.assert_close(model(x), wanted, rtol=2e-2, atol=2e-2)
    torch.cuda.synchronize()
    assert all(bool((each == 7.0).all()) for each in others)
    if turn == 3:
        model.reset_graphs()
assert model.graph_stats.replays >= 16
"""
    run(SPLIT + script)


# What is released.


@pytest.mark.alone
def test_dropped_pools_do_not_pile_up() -> None:
    module, x = Chain().to("cuda").eval(), torch.randn(8, 512, device="cuda")
    seen = []
    for turn in range(120):
        model: Any = sg.wrap(module, capture_sizes=[8], progress=False)
        for _ in range(3):
            model(x)
        assert model.graph_stats.captures == 1
        model.reset_graphs()
        if turn >= 19:
            seen.append((torch.cuda.memory_reserved(), -torch.cuda.mem_get_info()[0]))
    for before, *later in zip(*seen, strict=True):
        assert max(later) <= before + 64 * MIB
