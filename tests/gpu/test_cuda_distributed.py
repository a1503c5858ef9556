"""Ranks on GPUs of one host, on NCCL: graphs with collectives give eager's answers, and fail together."""

from __future__ import annotations

import datetime
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

import simplegraph as sg
from simplegraph.attention import SDPABackend, TritonDecodeBackend
from tests.distributed import sharing
from tests.distributed.launch import Failed, run_ranks, values
from tests.gpu.attention_backends import FA3, OTHERS

ROOT = Path(__file__).parent.parent.parent
WIDTH, INNER, LAYERS = 256, 1024, 4
SIZES = [1, 4, 16]
BOTH = "cpu:gloo,cuda:nccl"

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


class Layer(nn.Module):
    """A tensor parallel MLP with a residual: columns, rows, one all-reduce."""

    def __init__(self, rank: int, size: int, index: int) -> None:
        super().__init__()
        up, down = weights(index)
        self.up = nn.Parameter(up.chunk(size)[rank].cuda(), requires_grad=False)
        self.down = nn.Parameter(down.chunk(size, dim=1)[rank].cuda(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        dist.all_reduce(y)
        return x + y


class Functional(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return all_reduce(x / dist.get_world_size() + torch.relu(x @ self.up.T) @ self.down.T, "sum", dist.group.WORLD)


class Breaking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return halve(super().forward(x))


@sg.eager_break
def halve(x: Tensor) -> Tensor:
    return x * 0.5


class Forgetful(Layer):
    """Waits for its collective, but not in a capture."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        work = dist.all_reduce(y, async_op=True)
        if not torch.cuda.is_current_stream_capturing():
            work.wait()
        return x + y


class OnASideStream(Layer):
    """Its collective is on a stream that the forward forks to, and joins; `Lost` does not join it in a capture."""

    joins_in_captures = True

    def __init__(self, rank: int, size: int, index: int) -> None:
        super().__init__(rank, size, index)
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x @ self.up.T) @ self.down.T
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            dist.all_reduce(y)
        if self.joins_in_captures or not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.side)
        return x + y


class Lost(OnASideStream):
    joins_in_captures = False


class FailsOnRankOne(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1 and len(x) == 4 and torch.cuda.is_current_stream_capturing():
            raise ValueError("no graph of four rows here")
        return super().forward(x)


def weights(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    up = torch.randn(INNER, WIDTH, generator=generator) / WIDTH**0.5
    return up, torch.randn(WIDTH, INNER, generator=generator) / INNER**0.5


def whole(x: Tensor, layers: int = LAYERS, factor: float = 1.0) -> Tensor:
    """Return the output of all layers on one device, in float64."""
    x = x.double()
    for index in range(layers):
        up, down = (weight.double() for weight in weights(index))
        x = (x + torch.relu(x @ up.T) @ down.T) * factor
    return x


def batch(rows: int, step: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 + 17 * rows + step))


def stack(kind: type[Layer], rank: int, size: int) -> nn.Module:
    torch.cuda.set_device(rank)
    return nn.Sequential(*(kind(rank, size, index) for index in range(LAYERS))).eval()


def dtensor_stack(rank: int, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.cuda.set_device(rank)
    layers, plan = [], {}
    for index in range(LAYERS):
        up, down = weights(index)
        first, second = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        first.weight.data, second.weight.data = up, down
        plan |= {f"{len(layers)}": ColwiseParallel(), f"{len(layers) + 2}": RowwiseParallel()}
        layers += [first, nn.ReLU(), second]
    module = nn.Sequential(*layers).cuda().requires_grad_(False).eval()
    return parallelize_module(module, init_device_mesh("cuda", (size,)), plan)


def whole_without_residual(x: Tensor) -> Tensor:
    x = x.double()
    for index in range(LAYERS):
        up, down = (weight.double() for weight in weights(index))
        x = torch.relu(x @ up.T) @ down.T
    return x


ROWS = (1, 3, 4, 16, 9, 2, 16, 1)


def serve(rank: int, size: int, kind: Any, settings: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], Any]:
    module = dtensor_stack(rank, size) if kind == "dtensor" else stack(kind, rank, size)
    model = sg.wrap(module, capture_sizes=SIZES, ranks=sg.RankGroup(timeout=60), progress=False, **settings)
    with torch.inference_mode():
        if settings.get("capture") == "upfront":
            assert model.capture_graphs(batch(3).cuda()).failed == {}
        rounds = [(rows, step) for step in range(4) for rows in ROWS]
        found = [model(batch(rows, step).cuda()).float().cpu() for rows, step in rounds]
        expected = [module(batch(rows, step).cuda()).float().cpu() for rows, step in rounds]
    stats = model.graph_report().to_dict()
    model.reset_graphs()  # before the process group goes
    torch.cuda.synchronize()
    return found, expected, stats


@pytest.mark.parametrize("backend", ["nccl", BOTH])
@pytest.mark.parametrize("kind", [Layer, Functional, OnASideStream, "dtensor"])
def test_full_graphs_with_collectives_equal_eager_on_every_rank(kind: Any, backend: str) -> None:
    results = values(run_ranks(serve, 2, kind, {"capture": "upfront"}, backend=backend, limit=180))
    exact = whole_without_residual if kind == "dtensor" else whole
    for found, expected, stats in results:
        for (rows, step), y, eager in zip([(r, s) for s in range(4) for r in ROWS], found, expected, strict=True):
            torch.testing.assert_close(y, eager, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(y.double(), exact(batch(rows, step)), rtol=2e-2, atol=2e-2)
        assert (stats["captures"], stats["replays"], stats["eager"]) == (3, 29, {"proof": 3}), stats


def test_sizes_are_captured_on_all_ranks_as_calls_come() -> None:
    for found, expected, stats in values(run_ranks(serve, 2, Layer, {}, backend=BOTH, limit=180)):
        for y, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(y, eager, rtol=2e-3, atol=2e-3)
        assert stats["captures"] == 3
        assert stats["replays"] >= 24


def test_collectives_are_in_the_segments_between_eager_breaks() -> None:
    settings = {"capture": "upfront", "mode": "PIECEWISE"}
    for found, expected, stats in values(run_ranks(serve, 2, Breaking, settings, backend=BOTH, limit=180)):
        for y, eager in zip(found, expected, strict=True):
            torch.testing.assert_close(y, eager, rtol=2e-3, atol=2e-3)
        assert (stats["captures"], stats["replays"], stats["eager"]) == (3, 29, {"proof": 3}), stats


def fail_together(rank: int, size: int, kind: type[Layer]) -> tuple[dict[str, str], list[Tensor], dict[str, Any]]:
    model = sg.wrap(stack(kind, rank, size), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=60), progress=False)
    with torch.inference_mode():
        summary = model.capture_graphs(batch(3).cuda())
        found = [model(batch(rows).cuda()).float().cpu() for rows in ROWS]
    stats = model.graph_report().to_dict()
    model.reset_graphs()
    torch.cuda.synchronize()
    return {label: str(error) for label, error in summary.failed.items()}, found, stats


def test_a_size_that_fails_on_one_rank_runs_eagerly_on_both() -> None:
    for rank, (failed, found, stats) in enumerate(values(run_ranks(fail_together, 2, FailsOnRankOne, backend=BOTH))):
        for rows, y in zip(ROWS, found, strict=True):
            torch.testing.assert_close(y.double(), whole(batch(rows)), rtol=2e-2, atol=2e-2)
        assert list(failed) == ["batch size 4"]
        assert "no graph of four rows here" in failed["batch size 4"]
        assert ("on rank 1" in failed["batch size 4"]) == (rank == 0)
        assert (stats["captures"], stats["replays"], stats["eager"]) == (2, 3, {"capture_failed": 3, "proof": 2}), stats


@pytest.mark.parametrize("kind", [Forgetful, Lost])
def test_a_collective_that_is_not_joined_fails_on_both_and_eager_goes_on(kind: type[Layer]) -> None:
    for failed, found, _ in values(run_ranks(fail_together, 2, kind, backend=BOTH)):
        for rows, y in zip(ROWS, found, strict=True):
            torch.testing.assert_close(y.double(), whole(batch(rows)), rtol=2e-2, atol=2e-2)
        assert sorted(failed) == ["batch size 1", "batch size 16", "batch size 4"]
        assert all("not joined" in error for error in failed.values()), failed


def differ(rank: int, size: int) -> tuple[str, str, float]:
    model = sg.wrap(
        stack(Layer, rank, size), capture_sizes=[1, 4 + rank], ranks=sg.RankGroup(timeout=20), progress=False
    )
    began = time.monotonic()
    with torch.inference_mode():
        try:
            model.capture_graphs(batch(3).cuda())
        except sg.SimpleGraphError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", 0.0


def test_ranks_with_other_settings_get_the_same_error_at_once() -> None:
    first, second = values(run_ranks(differ, 2, backend=BOTH))
    assert first[:2] == second[:2]
    assert first[0] == "ConfigError"
    assert "rank 0 has (1, 4), rank 1 has (1, 5)" in first[1]
    assert max(first[2], second[2]) < 10


def die(rank: int, size: int) -> tuple[str, str, float]:
    ranks = sg.RankGroup(timeout=5)
    model = sg.wrap(stack(Layer, rank, size), capture_sizes=SIZES, ranks=ranks, progress=False)
    if rank == 1:
        os._exit(1)
    began = time.monotonic()
    with torch.inference_mode():
        try:
            model.capture_graphs(batch(3).cuda())
        except sg.RankError as error:
            return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", 0.0


def test_a_rank_that_died_is_an_error_within_the_timeout() -> None:
    left, dead = run_ranks(die, 2, backend=BOTH)
    assert isinstance(dead, Failed)
    assert left[0] == "RankError", left
    assert "rank 1 did not come within 5 s" in left[1]
    assert left[2] < 15


def gloo_alone(rank: int, size: int) -> str:
    model = sg.wrap(stack(Layer, rank, size), capture_sizes=SIZES, ranks=sg.RankGroup(timeout=20), progress=False)
    with torch.inference_mode():
        try:
            model.capture_graphs(batch(3).cuda())
        except sg.ConfigError as error:
            return str(error)
    return "nothing"


def test_a_group_without_nccl_is_refused_in_words() -> None:
    for text in values(run_ranks(gloo_alone, 2, backend="gloo")):
        assert "make it with nccl" in text


def move_weights(rank: int, size: int) -> tuple[Tensor, int]:
    module = dtensor_stack(rank, size)
    model = sg.wrap(module, capture_sizes=SIZES, ranks=sg.RankGroup(timeout=60), progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(4).cuda())
        model(batch(4).cuda())
        last = module[-1].weight
        last._local_tensor.data = last._local_tensor.data * 3
        found = [model(batch(4).cuda()).float().cpu() for _ in range(4)][-1]
    recaptures = model.graph_stats.recaptures
    model.reset_graphs()
    torch.cuda.synchronize()
    return found, recaptures


def test_the_weights_of_a_dtensor_that_move_are_captured_anew() -> None:
    for found, recaptures in values(run_ranks(move_weights, 2, backend=BOTH)):
        torch.testing.assert_close(found.double(), whole_without_residual(batch(4)) * 3, rtol=2e-2, atol=2e-2)
        assert recaptures == 1


def destroy(rank: int, size: int) -> str:
    group = dist.new_group(list(range(size)), timeout=datetime.timedelta(seconds=60))
    ranks = sg.RankGroup(communicators=[group], timeout=60)
    model = sg.wrap(stack(Layer, rank, size), capture_sizes=SIZES, ranks=ranks, progress=False)
    with torch.inference_mode():
        model.capture_graphs(batch(4).cuda())
        model(batch(4).cuda())
        torch.cuda.synchronize()
        dist.destroy_process_group(group)  # no graph holds a collective of this one, so NCCL lets it go
        try:
            model(batch(4).cuda())
        except sg.ReplayError as error:
            model.reset_graphs()
            return str(error)
    return "nothing"


def test_a_group_that_is_destroyed_under_live_graphs_is_named_on_every_rank() -> None:
    for text in values(run_ranks(destroy, 2, backend=BOTH)):
        assert "process group that the graphs' collectives belong to was destroyed" in text


BACKENDS = [
    *FA3,
    *OTHERS,
    TritonDecodeBackend,
    SDPABackend,
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("make", BACKENDS)
def test_ranks_that_share_a_context_give_attention_over_all_of_it(make: Any) -> None:
    long = make is not SDPABackend  # which gathers every page a request could have
    settings = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 16,
        "dtype": torch.bfloat16,
        "max_len": 4096 if long else 512,
        "num_pages": 2200 if long else 300,
        "max_reqs": 16,
        "capture_sizes": [1, 4, 16],
    }
    found = run_ranks(sharing.serve_both, 2, make, "cuda", 30, settings, backend=BOTH, limit=300)
    for seen, error, replays in itertools.chain.from_iterable(values(found)):
        assert (seen, replays) == ({"FULL"}, 31)
        assert error < 5e-3


def test_the_engine_generates_one_gpus_tokens_on_two() -> None:
    pytest.importorskip("transformers")
    from tests.distributed.test_bench import check_generated, generate

    expected, *_ = generate(0, 1, "cuda")
    check_generated(run_ranks(generate, 2, "cuda", backend=BOTH, limit=180), expected)


def llama_on_dtensors(rank: int, size: int) -> list[tuple[bool, bool, float]]:
    from torch.distributed.device_mesh import init_device_mesh

    from bench.models.dtensor import with_dtensors
    from bench.models.shard import Shard
    from bench.models.workload import INPUT_NAMES, Workload

    torch.cuda.set_device(rank)
    workload = Workload("8b", (1, 8), torch.device("cuda", rank), layers=4, shard=Shard(rank, size))
    plain = workload.build()
    model = with_dtensors(plain, init_device_mesh("cuda", (size,)))
    dims = dict.fromkeys(INPUT_NAMES, 0)
    graphed = sg.wrap(model, capture_sizes=[1, 8], batch_dims=dims, ranks=sg.RankGroup(timeout=60), progress=False)
    found = []
    with torch.inference_mode():
        assert graphed.capture_graphs(*workload.batch(8, plain.config.vocab_size)).failed == {}
        for step in range(10):
            batch = workload.batch((1, 8)[step % 2], plain.config.vocab_size, start=97 * step, mixed_lengths=True)
            expected, eager, replayed = (run(*batch).clone() for run in (plain, model, graphed))
            error = float((eager.double() - expected.double()).norm() / expected.double().norm())
            found.append((torch.equal(replayed, eager), bool(replayed.isfinite().all()), error))
        assert graphed.graph_stats.replays == 8  # and a call of each size that proved its graph
        graphed.reset_graphs()
    torch.cuda.synchronize()
    return found


def test_a_llama_of_dtensors_replays_what_it_computes_eagerly_to_the_bit() -> None:
    pytest.importorskip("transformers")
    for found in values(run_ranks(llama_on_dtensors, 2, backend=BOTH, limit=180)):
        assert all(equal and finite for equal, finite, _ in found), found
        assert max(error for *_, error in found) < 1e-2, found  # of eager on plain tensors


@pytest.mark.timeout(600)
def test_the_startup_benchmark_runs_on_two_gpus() -> None:
    pytest.importorskip("transformers")
    arms = "eager,plain-loop,simplegraph,simplegraph-piecewise"
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bench"]
    line += ["--smoke", "--tp", "2", "--arms", arms]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, env=environment, cwd=ROOT, start_new_session=True, **pipes)
    try:
        out, errors = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # torchrun's own children too
        raise
    assert process.returncode == 0, errors[-3000:]
    assert out.count("on each of 2 ranks") == 1
