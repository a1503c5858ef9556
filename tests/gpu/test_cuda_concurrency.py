"""Random numbers and streams that several graphs, threads and libraries use at the same time, on a real GPU."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.gpu.modules import mlp

pytestmark = pytest.mark.usefixtures("device_works")

WIDTH = 1 << 14


class SlowNoise(nn.Module):
    """Draws before and after a pause, in which a graph on another stream would change what it draws from."""

    def forward(self, x: Tensor) -> Tensor:
        first = torch.rand_like(x)
        torch.cuda._sleep(1_000_000)
        return x + first + torch.rand_like(x)


class OwnNoise(nn.Module):
    """Draws from a generator of its own: a warmup of it takes no number from other threads' default one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda")

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(1_000_000)
        return x + torch.rand(x.shape, device=x.device, generator=self.generator)


def noisy() -> Any:
    model: Any = sg.wrap(SlowNoise().eval(), capture_sizes=[4], progress=False)
    x = torch.zeros(4, WIDTH, device="cuda")
    for _ in range(3):
        model(x)
    return model


@pytest.mark.parametrize("threaded", [False, True])
def test_graphs_of_two_pools_on_two_streams_draw_what_eager_would(threaded: bool) -> None:
    models, streams = [noisy(), noisy()], [torch.cuda.Stream(), torch.cuda.Stream()]
    x = torch.zeros(4, WIDTH, device="cuda")
    torch.manual_seed(5)
    expected = [SlowNoise()(x) for _ in range(30)]
    torch.manual_seed(5)
    torch.cuda.synchronize()
    drawn: list[Tensor] = []

    def replay(which: int, turns: int) -> None:
        with torch.no_grad(), torch.cuda.stream(streams[which]):
            drawn.extend(models[which](x) for _ in range(turns))

    if threaded:
        threads = [threading.Thread(target=replay, args=(which, 15)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    else:
        for turn in range(30):
            replay(turn % 2, 1)
    torch.cuda.synchronize()
    assert [model.graph_stats.replays for model in models] == [17, 17]
    found = [next((at for at, wanted in enumerate(expected) if torch.equal(one, wanted)), None) for one in drawn]
    assert sorted(found, key=lambda at: -1 if at is None else at) == list(range(30))
    if not threaded:
        assert found == list(range(30))


def test_replays_that_draw_go_on_while_another_thread_captures() -> None:
    model, module, x = noisy(), SlowNoise(), torch.zeros(4, WIDTH, device="cuda")
    stop, errors, captures = threading.Event(), [], 0

    def capture() -> None:
        nonlocal captures
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set() or not captures:
                    other: Any = sg.wrap(OwnNoise().eval(), capture_sizes=[1, 2, 4], progress=False)
                    other.capture_graphs(torch.zeros(4, WIDTH, device="cuda"))
                    captures += other.graph_stats.captures
                    other.reset_graphs()
        except BaseException as error:
            errors.append(error)

    torch.manual_seed(6)
    expected = [module(x) for _ in range(40)]
    torch.manual_seed(6)
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        drawn = [model(x) for _ in range(40)]
    finally:
        stop.set()
        thread.join(60)
    assert errors == []
    assert captures >= 3
    assert model.graph_stats.replays == 42
    for one, wanted in zip(drawn, expected, strict=True):
        assert torch.equal(one, wanted)


# A stream of somebody else's.


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@pytest.mark.parametrize("drawing", [False, True])
def test_a_stream_that_its_owner_destroyed_is_not_waited_for(drawing: bool) -> None:
    module = SlowNoise().eval() if drawing else mlp()
    model: Any = sg.wrap(module, capture_sizes=[4], progress=False)
    width = WIDTH if drawing else 64
    for _ in range(3):
        model(torch.randn(4, width, device="cuda"))
    inputs = [torch.randn(4, width, device="cuda") for _ in range(12)]
    torch.manual_seed(9)
    expected = [module(x) for x in inputs]
    torch.manual_seed(9)
    torch.cuda.synchronize()
    actual = []
    for turn, x in enumerate(inputs):
        if turn % 2:
            actual.append(model(x))
            continue
        handle = ctypes.c_void_p()
        assert _driver().cuStreamCreate(ctypes.byref(handle), 1) == 0
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            output = model(x)
        torch.cuda.synchronize()  # allocations and outputs are the caller's to order
        actual.append(output)
        assert _driver().cuStreamDestroy_v2(handle) == 0
    torch.cuda.synchronize()
    assert model.graph_stats.replays >= 13
    for one, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, wanted)
    model.reset_graphs()
    assert model(inputs[0]).shape == inputs[0].shape
