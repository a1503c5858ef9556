"""Two micro-batches in one graph on a GPU: one computes while the other's collectives run on a stream beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from simplegraph import CudaGraphMode
from simplegraph.device.cuda.device import CudaDevice
from simplegraph.manager.lifecycle import Event
from tests.attention.test_two_batch import Overlapped
from tests.distributed.launch import run_ranks, values
from tests.distributed.test_two_batch import ALL, Ranked, serve
from tests.gpu.attention_backends import ATTENTION, ERROR, FA3, OTHERS, SHAPE
from tests.gpu.engine_modes import SIZES, TINY, generate

FULL = CudaGraphMode.FULL
BOTH = "cpu:gloo,cuda:nccl"
pytestmark = pytest.mark.usefixtures("timed_inference")


class Beside:
    """Work on another stream, as a collective is: it begins after what is queued, takes its time, and is waited for."""

    def __init__(self, stream: Any, part: Tensor, cycles: int) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            part.add_(part.mean(dim=1, keepdim=True))
        self._done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


class WithSideStream(Ranked):
    """Its collectives are `Beside`: late enough that whoever does not wait for one reads what it has not written."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.side = torch.cuda.Stream()
        super().__init__(0, 1, *args, device="cuda", **settings)

    def launch(self, part: Tensor) -> Beside:
        return Beside(self.side, part, 200_000)


def steps_of(sizes: tuple[int, ...] | None, *, forget: bool = False, **settings: Any) -> tuple[list[Tensor], int]:
    """Run six steps with fresh inputs over outputs that hold NaN, without graphs if `forget`; count the replays."""
    served = WithSideStream(sizes, capture_sizes=[2, 4, 8], **settings)
    if settings["mode"] == "FULL":
        assert served.manager.capture(served.forward).failed == {}
    if forget:
        for key in list(served.manager.programs):
            served.manager.table.graphs.pop(key).drop(Event.DROPPED)
    found = served.steps()
    torch.cuda.synchronize()
    replays = served.manager.stats.replays
    served.manager.reset()
    return found, replays


@pytest.mark.parametrize("sizes", [ALL, (4,)])
def test_halves_on_two_streams_in_one_graph_give_eagers_answers(sizes: tuple[int, ...]) -> None:
    expected, _ = steps_of(None, mode="NONE")
    found, replays = steps_of(sizes, mode="FULL")
    assert replays == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_replay_in_halves_is_eager_in_halves_to_the_bit() -> None:
    found, replays = steps_of(ALL, mode="FULL")
    eager, others = steps_of(ALL, mode="FULL", forget=True)
    assert (replays, others) == (6, 0)
    assert all(torch.equal(one, other) for one, other in zip(found, eager, strict=True))


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group(BOTH, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_collectives_of_nccl_on_one_rank() -> None:
    expected, *_ = serve(0, 1, None, "cuda")
    found, _, stats, _ = serve(0, 1, ALL, "cuda")
    assert stats["replays"] == 6
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sizes", [ALL, (4,)])
def test_two_ranks_answer_as_one_that_splits_nothing(sizes: tuple[int, ...]) -> None:
    expected, *_ = serve(0, 1, None, "cuda")
    for found, launched, stats, _ in values(run_ranks(serve, 2, sizes, "cuda", backend=BOTH, limit=180)):
        assert (stats["replays"], launched) == (6, [])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_engine_generates_one_gpus_tokens_on_two() -> None:
    pytest.importorskip("transformers")
    from tests.distributed import test_bench

    expected, *_ = test_bench.generate(0, 1, "cuda")
    found = run_ranks(test_bench.generate, 2, "cuda", "on", backend=BOTH, limit=180)
    test_bench.check_generated(found, expected)


@pytest.mark.parametrize("make", [*FA3, *OTHERS])
def test_backends_serve_uniform_decode_in_halves(make: Any, cuda: CudaDevice) -> None:
    """Padded halves, and second ones of padding alone, among them; each half has a plan of its own."""
    limits = {"max_reqs": 64, "max_len": 2048, "num_pages": 8000, "max_tokens": 256}
    served = Overlapped(
        cuda.torch_device,
        make=make,
        num_heads=32,
        **SHAPE,
        **limits,
        mode="FULL_DECODE_ONLY",
        capture_sizes=[2, 8, 48, 64],
    )
    assert served.capture().failed == {}
    for seed in range(24):
        ran, error = served.step(served.requests("decode", [2, 3, 7, 8, 33, 64][seed % 6], seed), seed)
        assert (ran, error <= ERROR) == (FULL, True), error


@pytest.mark.parametrize("make", FA3)
def test_prompts_are_cut_between_the_halves(make: Any, cuda: CudaDevice) -> None:
    limits = {"max_reqs": 64, "max_len": 512, "num_pages": 8000, "max_tokens": 256}
    served = Overlapped(
        cuda.torch_device, make=make, num_heads=32, **SHAPE, **limits, mode="FULL", capture_sizes=[16, 64, 256]
    )
    assert served.capture().failed == {}
    for seed in range(30):
        ran, error = served.step(served.requests("mixed", [1, 2, 7, 33, 64][seed % 5], seed), seed)
        assert (ran, error <= ERROR) == (FULL, True), error


def splits(engine: Any) -> Callable[[], object]:
    """Look at an engine: graphs that are split are replayed."""
    overlap, graphs = engine.runner.overlap, engine.runner.manager.stats.graphs

    def look_again() -> None:
        assert sum(graph.replays for (mode, each), graph in graphs.items() if overlap.split(mode, each)) > 100

    return look_again


def llama(dtype: torch.dtype) -> Any:
    transformers = pytest.importorskip("transformers")
    from bench.models.llama import CacheShape, build_llama

    config = transformers.LlamaConfig(**TINY, max_position_embeddings=1024, initializer_range=0.1)
    return build_llama(config, CacheShape(1, 16), 512, device="cuda", dtype=dtype, seed=3)


def test_the_engine_generates_eagers_tokens_in_halves() -> None:
    model = llama(torch.float32)
    expected = generate(model, lambda _: bool, mode="NONE", overlap=False, attention="sdpa")
    answer = functools.partial(generate, model, splits, two_batch_overlap="on", capture_sizes=SIZES)
    for mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        assert answer(mode=mode, attention="sdpa") == expected, mode
    assert answer(attention="triton") == expected
    assert answer(attention="sdpa", num_pages=300) == expected  # requests give way


@pytest.mark.parametrize("attention", ATTENTION)
def test_the_engine_runs_fused_layers_in_halves(attention: str) -> None:
    """Rounding may decide near ties in half precision: products of other shapes round otherwise."""
    model = llama(torch.bfloat16)
    expected = generate(model, lambda _: bool, attention=attention)
    found = generate(model, splits, attention=attention, two_batch_overlap="on")
    agreeing = sum(one[:4] == other[:4] for one, other in zip(found, expected, strict=True))
    assert agreeing >= 48, f"the first 4 tokens of {agreeing} of 64 requests"
