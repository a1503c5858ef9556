"""Threads and streams: whoever calls, and from where, gets eager's answer to its own question."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import CudaGraphManager, Reason
from simplegraph.device.emulator.device import emulator
from simplegraph.device.select import graph_device

SIZES = [1, 2, 4, 8]
WIDTH = 16

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def on_stream(device: torch.device) -> Callable[[int], contextlib.AbstractContextManager[Any]]:
    """Make stream number n current; 0 is the default one."""
    if device.type == "cpu":
        return lambda number: emulator().stream(number + 100 if number else 0)
    streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(3))]
    torch.cuda.synchronize()
    return lambda number: torch.cuda.stream(streams[number])


def together(*work: Callable[[], None], timeout: float = 60) -> None:
    """Run all of it at the same time; whatever any of it raises is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(work))

    def run(one: Callable[[], None]) -> None:
        try:
            barrier.wait(timeout)
            with torch.no_grad():
                one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    if errors:
        raise errors[0]


class Mlp(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))) * self.factor + x


def wrapped(device: torch.device, factor: float = 1.0, **settings: Any) -> tuple[Any, nn.Module]:
    module = Mlp(factor).to(device).eval()
    settings.setdefault("capture_sizes", SIZES)
    return sg.wrap(module, progress=False, **settings), module


def serve(model: Any, module: nn.Module, device: torch.device, seed: int, sizes: list[int], turns: int) -> None:
    generator = torch.Generator(device).manual_seed(seed)
    for turn in range(turns):
        x = torch.randn(sizes[turn % len(sizes)], WIDTH, device=device, generator=generator)
        torch.testing.assert_close(model(x), module(x))


def test_threads_calling_one_model_with_different_sizes_get_their_own_answers(device: torch.device) -> None:
    model, module = wrapped(device)
    plans = [[8, 3, 1], [2, 5], [4, 4, 7, 9]]
    together(
        *(
            lambda seed=seed, sizes=sizes: serve(model, module, device, seed, sizes, 40)
            for seed, sizes in enumerate(plans)
        )
    )
    assert model.graph_stats.captures == len(SIZES)
    assert model.graph_stats.failures == {}
    assert model.graph_stats.replays >= 90
    assert 118 <= model.graph_stats.replays + model.graph_stats.eager.total() <= 120  # eager's count takes no lock


def test_threads_calling_one_model_with_the_same_size_get_their_own_answers(device: torch.device) -> None:
    model, module = wrapped(device, capture_sizes=[4])
    together(*(lambda seed=seed: serve(model, module, device, seed, [4], 50) for seed in range(4)))
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays >= 190


def test_two_models_sharing_a_pool_in_two_threads_never_mix_up(device: torch.device) -> None:
    pool = graph_device(device).new_pool()
    pairs = [wrapped(device, factor, pool=pool) for factor in (1.0, -3.0)]
    together(*(lambda pair=pair: serve(*pair, device, 1, [8, 3, 1, 4], 60) for pair in pairs))
    for model, _ in pairs:
        assert model.graph_manager.pool is pool
        assert model.graph_stats.captures == len(SIZES) - 1
        assert model.graph_stats.replays >= 45


def test_two_models_of_their_own_pools_capture_at_the_same_time(device: torch.device) -> None:
    pairs = [wrapped(device, factor) for factor in (1.0, 2.0, 3.0)]

    def work(model: Any, module: nn.Module) -> None:
        for _ in range(3):
            assert model.capture_graphs(torch.zeros(2, WIDTH, device=device)).captured == len(SIZES)
            serve(model, module, device, 3, [8, 3, 1], 6)
            model.reset_graphs()

    together(*(lambda pair=pair: work(*pair) for pair in pairs))
    assert [model.graph_stats.replays for model, _ in pairs] == [18] * 3


def test_one_thread_captures_while_another_runs_eagerly(device: torch.device) -> None:
    model, module = wrapped(device)
    other = Mlp(5.0).to(device).eval()
    done = threading.Event()
    rounds = [0]

    def capture() -> None:
        try:
            for _ in range(8):
                assert model.capture_graphs(torch.zeros(2, WIDTH, device=device)).failed == {}
                serve(model, module, device, 3, [8, 3], 4)
                model.reset_graphs()
        finally:
            done.set()

    def run() -> None:
        x = torch.ones(5, WIDTH, device=device)
        expected = other(x)
        while not done.is_set() or rounds[0] < 3:
            torch.testing.assert_close(other(x), expected)
            rounds[0] += 1

    together(capture, run)
    assert rounds[0] >= 3
    assert model.graph_stats.replays == 32


def test_one_thread_resets_while_others_call(device: torch.device) -> None:
    model, module = wrapped(device, capture_sizes=[2, 4])

    def reset() -> None:
        for _ in range(15):
            serve(model, module, device, 9, [3], 2)
            model.reset_graphs()

    together(
        reset,
        lambda: serve(model, module, device, 1, [4, 1, 3], 40),
        lambda: serve(model, module, device, 2, [2], 40),
    )
    serve(model, module, device, 4, [3], 4)
    assert model.graph_stats.replays >= 1


def test_weights_that_move_in_one_thread_are_never_stale_in_the_others(device: torch.device) -> None:
    module = nn.Linear(WIDTH, WIDTH, bias=False).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    lock = threading.Lock()

    def move() -> None:
        for turn in range(20):
            with lock:
                module.weight.data = torch.full((WIDTH, WIDTH), float(turn), device=device)
            serve_values()

    def serve_values() -> None:
        x = torch.ones(3, WIDTH, device=device)
        with lock:
            actual, expected = model(x), module(x)
        torch.testing.assert_close(actual, expected)

    def read() -> None:
        for _ in range(60):
            serve_values()

    together(move, read)


def test_eager_in_one_thread_leaves_the_graphs_of_the_others_alone(device: torch.device) -> None:
    model, module = wrapped(device)
    model.capture_graphs(torch.zeros(2, WIDTH, device=device))

    def eagerly() -> None:
        with sg.eager():
            serve(model, module, device, 1, [4], 20)

    together(eagerly, lambda: serve(model, module, device, 2, [4], 20))
    assert model.graph_stats.replays == 20
    assert model.graph_stats.eager == {Reason.SWITCHED_OFF: 20}


def test_descriptions_belong_to_the_thread_that_made_them(device: torch.device) -> None:
    model, module = wrapped(device, mode="FULL_DECODE_ONLY", capture_sizes=[4])

    def decode() -> None:
        with sg.describe(num_reqs=4, uniform_query_len=1):
            serve(model, module, device, 1, [4], 20)

    together(decode, lambda: serve(model, module, device, 2, [4], 20))
    assert model.graph_stats.eager[Reason.MIXED_BATCH] == 20
    assert model.graph_stats.replays >= 18


@pytest.mark.parametrize("lazy", [True, False])
def test_changing_streams_gives_the_same_answers(device: torch.device, on_stream: Any, lazy: bool) -> None:
    model, module = wrapped(device)
    if not lazy:
        with on_stream(2):
            model.capture_graphs(torch.zeros(2, WIDTH, device=device))
    inputs = [torch.randn(rows, WIDTH, device=device) for rows in (8, 3, 1, 4, 3) * 5]
    expected = [module(x) for x in inputs]
    graph_device(device).synchronize()
    actual = []
    for turn, x in enumerate(inputs):
        with on_stream(turn % 3):
            actual.append(model(x))
    graph_device(device).synchronize()
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert model.graph_stats.replays >= 15


def test_threads_on_streams_of_their_own_get_their_own_answers(device: torch.device, on_stream: Any) -> None:
    model, module = wrapped(device)

    def work(number: int) -> None:
        with on_stream(number):
            serve(model, module, device, number, [8, 3, 1], 30)

    together(*(lambda number=number: work(number) for number in range(3)))
    assert model.graph_stats.replays >= 70


def test_engines_sharing_a_pool_on_changing_streams_are_ordered(device: torch.device, on_stream: Any) -> None:
    x = torch.zeros(8, WIDTH, device=device)

    def forward(mode: Any, descriptor: Any) -> Tensor:
        return x[: descriptor.num_tokens] * 3

    first = CudaGraphManager(device=device, capture_sizes=SIZES, progress=False)
    second = CudaGraphManager(device=device, capture_sizes=SIZES, progress=False, pool=first.pool)
    with on_stream(1):
        first.capture(forward)
    with on_stream(2):
        second.capture(forward)
    for turn in range(12):
        manager = (first, second)[turn % 2]
        with on_stream(turn % 3):
            with manager.pool.lock:
                manager.table.order_streams()
                x.fill_(float(turn))
                result = manager.run(manager.dispatch(5), forward).clone()
            assert result.unique().tolist() == [3.0 * turn]
    assert (first.stats.replays, second.stats.replays) == (6, 6)


def test_a_failing_capture_in_one_thread_never_disturbs_another(device: torch.device) -> None:
    class Faulty(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            x.sum().item()
            return super().forward(x)

    faulty = Faulty().to(device).eval()
    bad = sg.wrap(faulty, capture_sizes=SIZES, progress=False)
    good, module = wrapped(device)
    together(
        lambda: serve(bad, faulty, device, 1, [8, 3, 1, 2], 24),
        lambda: serve(good, module, device, 2, [8, 3, 1, 2], 40),
    )
    assert bad.graph_stats.replays == 0
    assert len(bad.graph_stats.failures) == len(SIZES)
    assert good.graph_stats.failures == {}
    assert good.graph_stats.captures == len(SIZES)


class Noisy(nn.Module):
    """Draws random numbers; `meanwhile` is called in the middle, captures included."""

    def __init__(self, meanwhile: Callable[[], object] = bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.meanwhile = meanwhile

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + torch.rand(WIDTH, device=x.device)
        self.meanwhile()
        return y


def noisy(device: torch.device, meanwhile: Callable[[], object] = bool, **settings: Any) -> tuple[Any, nn.Module]:
    module = Noisy(meanwhile).to(device).eval()
    return sg.wrap(module, capture_sizes=[4], progress=False, **settings), module


def test_a_replay_that_draws_while_another_thread_captures_draws_what_eager_would(device: torch.device) -> None:
    captures = graph_device(device)
    inside, drawn = threading.Event(), threading.Event()
    results: list[Tensor] = []

    def meanwhile() -> None:
        if captures.is_capturing():
            inside.set()
            drawn.wait(0.3)  # time in which the other thread may draw: it has to wait for this capture

    def replay() -> None:
        assert inside.wait(30)
        results.append(model(x))
        drawn.set()

    (model, module), (slow, _) = noisy(device), noisy(device, meanwhile)
    x = torch.randn(4, WIDTH, device=device)
    for _ in range(3):
        model(x)
    torch.manual_seed(11)
    module(x)  # draws what the run before the capture does
    results += [module(x), module(x)]
    torch.manual_seed(11)
    together(lambda: slow.capture_graphs(x), replay)
    results.append(model(x))
    assert (slow.graph_stats.captures, model.graph_stats.replays) == (1, 4)
    expected, actual = results[:2], results[2:]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_graphs_that_draw_are_ordered_from_stream_to_stream_and_others_are_not(
    device: torch.device, on_stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _), (second, _), (quiet, _) = noisy(device), noisy(device), wrapped(device, capture_sizes=[4])
    x = torch.randn(4, WIDTH, device=device)
    models, graphs, waited = (first, second, quiet), graph_device(device), []
    for number, model in enumerate(models):
        with on_stream(number + 1):
            for _ in range(3):
                model(x)
    handles = {}
    for number in range(1, 4):
        with on_stream(number):
            handles[graphs.current_stream()] = number
    wait_for = graphs.wait_for
    monkeypatch.setattr(graphs, "wait_for", lambda stream: (waited.append(handles.get(stream)), wait_for(stream))[1])
    for number in (1, 2, 2, 3, 1, 3):
        with on_stream(number):
            models[number - 1](x)
    assert waited == [3, 1, 2]  # a graph's first replay tells if it draws; memory is each pool's own
    assert [model.graph_stats.replays for model in models] == [4, 4, 4]
