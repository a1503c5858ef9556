"""Wrapped modules on a real GPU: random numbers, streams, threads and what others do at the same time."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason
from tests.gpu.modules import SIZES, captured, mlp, poison

pytestmark = pytest.mark.usefixtures("device_works")


# Random numbers.


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5, training=True) + torch.rand_like(x)


def test_sampling_draws_the_numbers_that_eager_would() -> None:
    module = Dropout().to("cuda").eval()
    model = captured(module, torch.randn(4, 32, device="cuda"))
    inputs = [torch.randn(rows, 32, device="cuda") for rows in (4, 4, 8, 2, 4)]
    torch.manual_seed(7)
    expected = [module(x) for x in inputs] + [torch.rand(4, device="cuda")]
    torch.manual_seed(7)
    actual = [model(x) for x in inputs] + [torch.rand(4, device="cuda")]
    assert model.graph_stats.replays == len(inputs)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_two_replays_never_sample_the_same_numbers() -> None:
    model = captured(Dropout().to("cuda").eval(), torch.randn(4, 32, device="cuda"))
    x = torch.randn(4, 32, device="cuda")
    results = [model(x) for _ in range(4)]
    assert all(not torch.equal(one, other) for one in results for other in results if one is not other)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, device=x.device, generator=self.generator)


def test_a_generator_of_the_modules_own_is_followed() -> None:
    module, reference = OwnGenerator().eval(), OwnGenerator().eval()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    for _ in range(5):
        for rows in (4, 8):
            x = torch.randn(rows, 4, device="cuda")
            assert torch.equal(model(x), reference(x))
    assert model.graph_stats.replays >= 4
    assert model.graph_stats.failures == {}


# Streams and threads.


class Slow(nn.Module):
    """Reads its input before and after a pause: who overwrites it in between is found out."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch.cuda._sleep(1_000_000)
        return y + x


@pytest.mark.parametrize("lazy", [True, False])
def test_changing_streams_never_mixes_up_calls(lazy: bool) -> None:
    module = Slow().eval()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    if not lazy:
        model.capture_graphs(torch.randn(4, 1 << 16, device="cuda"))
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    inputs = [torch.full((rows, 1 << 16), float(turn), device="cuda") for turn, rows in enumerate([4, 3, 8, 4, 1] * 6)]
    torch.cuda.synchronize()
    outputs = []
    for turn, x in enumerate(inputs):
        with torch.cuda.stream(streams[turn % 3]):
            outputs.append(model(x))
    torch.cuda.synchronize()
    for turn, output in enumerate(outputs):
        assert output.shape == inputs[turn].shape
        assert output.unique().tolist() == [3.0 * turn]
    assert model.graph_stats.replays >= 15


def test_two_models_sharing_a_pool_on_two_streams_never_mix_up_calls() -> None:
    managers = []
    x = torch.zeros(8, 1 << 16, device="cuda")
    for _ in range(2):
        pool = managers[0].pool if managers else None
        managers.append(sg.CudaGraphManager(device="cuda", pool=pool, capture_sizes=[4, 8], progress=False))

    def forward(mode: Any, descriptor: Any) -> Tensor:
        rows = x[: descriptor.num_tokens]
        y = rows * 2
        torch.cuda._sleep(1_000_000)
        return y + rows

    for manager in managers:
        assert manager.capture(forward).captured == 2
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for turn in range(12):
        manager = managers[turn % 2]
        with torch.cuda.stream(streams[turn % 2]):
            manager.table.order_streams()
            x.fill_(float(turn))
            results.append(manager.run(manager.dispatch(5), forward).clone())
    torch.cuda.synchronize()
    assert [result.unique().tolist() for result in results] == [[3.0 * turn] for turn in range(12)]
    assert [manager.stats.replays for manager in managers] == [6, 6]


def test_two_threads_calling_one_model_always_get_their_own_answers() -> None:
    module = mlp()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    errors: list[BaseException] = []
    barrier = threading.Barrier(3)

    def serve(seed: int) -> None:
        try:
            generator = torch.Generator("cuda").manual_seed(seed)
            barrier.wait(30)
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(40):
                    x = torch.randn(1 + (seed + turn) % 9, 64, device="cuda", generator=generator)
                    actual = model(x)
                    torch.testing.assert_close(actual, module(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert model.graph_stats.captures == len(SIZES)
    assert model.graph_stats.replays >= 60


def test_one_thread_captures_while_another_runs_eager_work() -> None:
    module, other = mlp(), mlp(128)
    x = torch.randn(4, 64, device="cuda")
    expected = module(x)
    stop, errors, rounds = threading.Event(), [], 0

    def work() -> None:
        nonlocal rounds
        try:
            with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
                y = torch.ones(16, 128, device="cuda")
                truth = other(y).sum().item()
                while not stop.is_set() or rounds < 3:
                    assert other(y).sum().item() == pytest.approx(truth, rel=1e-4)
                    rounds += 1
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            model = captured(module, x, capture_sizes=[1, 2, 4, 8, 16, 32])
            poison(model)
            torch.testing.assert_close(model(x), expected)
            model.reset_graphs()
    finally:
        stop.set()
        thread.join(30)
    assert errors == []
    assert rounds >= 3


# Someone else's capture.


@pytest.mark.parametrize("calls_before", [0, 1, 5])
def test_inside_the_users_own_capture_the_forward_is_recorded_there(calls_before: int) -> None:
    module = mlp()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    x = torch.randn(4, 64, device="cuda")
    for _ in range(calls_before):
        model(x)
    module(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    for _ in range(2):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(y, module(x))
    assert model.graph_stats.eager[Reason.BUSY] == 1
    for _ in range(5):
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays >= 2


def test_capture_graphs_inside_the_users_own_capture_is_refused_and_breaks_nothing() -> None:
    module = mlp()
    x = torch.randn(4, 64, device="cuda")
    module(x)
    models = [sg.wrap(module, capture_sizes=SIZES, progress=False), captured(module, x)]
    models[1].reset_graphs()
    for model in models:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(sg.SimpleGraphError, match="being captured"):
                model.capture_graphs(x)
            y = module(x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, module(x))
        assert model.capture_graphs(x).captured == len(SIZES)
        torch.testing.assert_close(model(x), module(x))


def test_static_outputs_and_inputs_in_place_replay_right_and_allocate_nothing() -> None:
    module = mlp()
    model = captured(module, torch.randn(4, 64, device="cuda"), outputs="static")
    for rows in (4, 3, 8, 1, 3):
        (x,) = model.static_inputs(rows).values()
        x.normal_()
        torch.testing.assert_close(model(x), module(x))
        poison(model)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        y = model(x)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        torch.testing.assert_close(y, module(x))


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_every_grad_mode_replays_what_another_captured(grad_mode: Any) -> None:
    module = mlp()
    model = captured(module, torch.randn(4, 64, device="cuda"))
    with grad_mode():
        for rows in (4, 3):
            x = torch.randn(rows, 64, device="cuda")
            poison(model)
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 2


# Work of other threads.


class Late(nn.Module):
    """Computes in another thread, on that thread's own stream, long after the call has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def compute(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(20_000_000)  # some 10 ms
        with torch.no_grad():
            return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(self.compute, x + 1).result() * 2


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 4), (4, 4)])
def test_a_call_waits_for_what_other_threads_compute_and_no_graph_serves_it(rows: int, size: int) -> None:
    module = Late().to("cuda").eval()
    model = sg.wrap(module, capture_sizes=[size], progress=False)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(rows, 32, device="cuda")
            torch.testing.assert_close(model(x), module.linear(x + 1) * 2)
    assert model.graph_stats.replays == 0
    assert "what another thread computed" in str(model.graph_report())
