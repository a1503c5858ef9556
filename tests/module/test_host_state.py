"""State of the host outside of modules and containers: each call advances it once, as eager does."""

from __future__ import annotations

import array
import collections
import hashlib
import io
import itertools
import pathlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason
from tests.module.answers import reasons

WIDTH = 4
TOTAL = 0
DRAWS = random.Random(0)


def numbers() -> Iterator[int]:
    count = 0
    while True:
        yield count
        count += 1


class Advancing(nn.Module):
    """Multiplies by what advances, or only advances it.

    Args:
        held: what does; advance: how, and to what number; read: tells how far it is.
        quiet: no answer depends on it.
    """

    def __init__(self, held: Any, advance: Callable[[Any], float], *, quiet: bool) -> None:
        super().__init__()
        self.linear, self.held, self.advance, self.quiet = nn.Linear(WIDTH, WIDTH), held, advance, quiet

    def forward(self, x: Tensor) -> Tensor:
        number = self.advance(self.held)
        return self.linear(x) if self.quiet else self.linear(x) * number


def add(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def put(held: Any) -> float:
    held.put(1)
    return float(held.qsize())


def read_line(held: Any) -> float:
    return float(held.readline())


def turn(held: Any) -> float:
    (held.clear if held.is_set() else held.set)()
    return 2.0 if held.is_set() else 3.0


def lines() -> io.StringIO:
    return io.StringIO("\n".join(map(str, range(50))))


# How it is made, how it advances, and how far it is.
STATES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "random.Random": (lambda: random.Random(3), lambda held: held.random(), lambda held: held.getstate()),
    "numpy's generator": (
        lambda: np.random.default_rng(3),
        lambda held: float(held.random()),
        lambda held: held.bit_generator.state,
    ),
    "numpy's old generator": (
        lambda: np.random.RandomState(3),
        lambda held: held.rand(),
        lambda held: held.get_state()[2],
    ),
    "numpy's bits": (lambda: np.random.PCG64(3), lambda held: held.random_raw() % 7, lambda held: held.state),
    "numpy's seeds": (
        lambda: np.random.SeedSequence(3),
        lambda held: held.spawn(1)[0].spawn_key[0] + 1.0,
        lambda held: held.n_children_spawned,
    ),
    "count": (lambda: itertools.count(1), next, repr),
    "cycle": (lambda: itertools.cycle(range(20)), next, lambda held: next(held)),
    "list iterator": (lambda: iter(list(range(30))), next, lambda held: held.__length_hint__()),
    "enumerate": (lambda: enumerate(range(30)), lambda held: next(held)[0], lambda held: next(held)),
    "generator": (numbers, next, lambda held: held.gi_frame.f_locals["count"]),
    "file": (lines, read_line, lambda held: held.tell()),
    "written file": (io.BytesIO, lambda held: held.write(b"x"), lambda held: held.getvalue()),
    "bytearray": (lambda: bytearray(2), add, bytes),
    "array": (lambda: array.array("i", [0, 0]), add, list),
    "NumPy's array": (lambda: np.zeros(3), add, list),
    "SimpleQueue": (queue.SimpleQueue, put, lambda held: held.qsize()),
    "event": (threading.Event, turn, lambda held: held.is_set()),
    "semaphore": (
        lambda: threading.Semaphore(50),
        lambda held: held.acquire() and held._value,
        lambda held: held._value,
    ),
    "hash": (hashlib.md5, lambda held: held.update(b"x") or held.digest()[0], lambda held: held.digest()),
    "global generator": (int, lambda held: DRAWS.random(), lambda held: DRAWS.getstate()),
}


def answers(make: Callable[[], Any], read: Callable[[Any], Any], device: torch.device) -> tuple[Any, list[Any]]:
    """Return what six calls gave, and how far the state is after them."""
    DRAWS.seed(0)
    torch.manual_seed(0)
    model = make()
    xs = torch.randn(6, 3, WIDTH, device=device)
    with torch.no_grad():
        found = [model(x) for x in xs]
    return model, [*found, read(sg.unwrap(model).held)]


@pytest.mark.parametrize("quiet", [False, True], ids=["read", "quiet"])
@pytest.mark.parametrize("name", STATES)
def test_each_call_advances_it_once_and_no_recording_does(name: str, quiet: bool, device: torch.device) -> None:
    made, advance, read = STATES[name]
    plain = lambda: Advancing(made(), advance, quiet=quiet).to(device).eval()  # noqa: E731
    _, expected = answers(plain, read, device)
    model, found = answers(lambda: sg.wrap(plain(), capture_sizes=[3], progress=False), read, device)
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other)
    assert found[-1] == expected[-1]
    assert model.graph_stats.replays == 0
    assert model.graph_stats.captures == 0
    assert model.graph_stats.eager[Reason.PYTHON_STATE] == 4, reasons(model)


class Stats:
    """Numbers of a class, and of objects without a dict."""

    total = 0
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = 0


STATS, LISTED = Stats(), [0]


def in_a_global() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def in_a_closure(number: int = 0) -> Callable[[], int]:
    def add() -> int:
        nonlocal number
        number += 1
        return number

    return add


def in_a_class() -> int:
    Stats.total += 1
    return Stats.total


def in_slots() -> int:
    STATS.own += 1
    return STATS.own


def in_a_list() -> int:
    LISTED[0] += 1
    return LISTED[0]


def in_a_default(held: list[int] = [0]) -> int:  # noqa: B006
    held[0] += 1
    return held[0]


def in_an_attribute() -> int:
    vars(in_an_attribute)["calls"] = vars(in_an_attribute).get("calls", 0) + 1
    return int(vars(in_an_attribute)["calls"])


def of_this_thread() -> Callable[[], int]:
    local = threading.local()
    local.calls = 0

    def add() -> int:
        local.calls += 1
        return int(local.calls)

    return add


COUNT = 0
# What counts, and the name that the reason gives the number.
COUNTERS: dict[str, tuple[Callable[[], Callable[[], int]], str]] = {
    "global": (lambda: in_a_global, f"the global COUNT of {__name__}"),
    "closure": (in_a_closure, "the variable number in the closure of in_a_closure.<locals>.add"),
    "class": (lambda: in_a_class, "the attribute total of class Stats"),
    "slots": (lambda: in_slots, f"the global STATS of {__name__}"),
    "list": (lambda: in_a_list, f"the global LISTED of {__name__}"),
    "default": (lambda: in_a_default, "a default argument of in_a_default"),
    "attribute": (lambda: in_an_attribute, "the attribute calls of in_an_attribute"),
    "thread": (of_this_thread, "the variable local in the closure of of_this_thread.<locals>.add"),
}


@pytest.mark.parametrize("quiet", [False, True], ids=["read", "quiet"])
@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("name", COUNTERS)
def test_a_number_that_code_counts_is_counted_once_a_call(
    name: str, rows: int, quiet: bool, device: torch.device
) -> None:
    made, named = COUNTERS[name]
    count = made()
    plain = Advancing(None, lambda _: count(), quiet=quiet).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[3], progress=False)
    x, start = torch.randn(rows, WIDTH, device=device), count()
    with torch.no_grad():
        for turn in range(1, 7):
            number = 1 if quiet else start + turn
            torch.testing.assert_close(model(x), plain.linear(x) * number)
    assert count() == start + 7
    assert model.graph_stats.replays == 0
    assert named in str(model.graph_report())


@pytest.mark.parametrize("name", COUNTERS)
def test_a_capture_of_all_sizes_counts_as_its_one_real_run(name: str, device: torch.device) -> None:
    count = COUNTERS[name][0]()
    plain = Advancing(None, lambda _: count(), quiet=True).to(device).eval()
    model = sg.wrap(plain, capture_sizes=[2, 3, 4], progress=False)
    start = count()
    assert model.capture_graphs(torch.randn(3, WIDTH, device=device)).captured == 0
    assert count() == start + 2


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_a_recording_puts_a_dicts_keys_back_in_their_order(kind: type[dict[int, float]], device: torch.device) -> None:
    def model() -> Advancing:
        held = kind((key, key / 2) for key in range(2, 30))
        return Advancing(held, lambda held: held.pop(next(iter(held))), quiet=False).to(device).eval()

    _, expected = answers(model, lambda held: [*held.items()], device)
    _, found = answers(
        lambda: sg.wrap(model(), capture_sizes=[3], progress=False), lambda held: [*held.items()], device
    )
    for one, other in zip(found[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(one, other)
    assert found[-1] == expected[-1]


@pytest.mark.parametrize("name", ["random.Random", "bytearray"])
def test_no_graph_of_a_capture_of_all_sizes_serves_it(name: str, device: torch.device) -> None:
    made, advance, read = STATES[name]
    DRAWS.seed(0)
    model = sg.wrap(Advancing(made(), advance, quiet=True).to(device).eval(), capture_sizes=[3], progress=False)
    x = torch.randn(3, WIDTH, device=device)
    assert model.capture_graphs(x).captured == 0
    with torch.no_grad():
        for _ in range(3):
            before = read(sg.unwrap(model).held)
            model(x)
            assert read(sg.unwrap(model).held) != before
    assert model.graph_stats.replays == 0


def test_the_reason_names_what_advances(device: torch.device) -> None:
    model = sg.wrap(Advancing(random.Random(0), lambda held: held.random(), quiet=False).to(device).eval())
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(3, WIDTH, device=device))
    assert model.graph_stats.details[Reason.PYTHON_STATE] == "held"


def test_a_training_step_with_a_generator_of_its_own_draws_as_eager_does(device: torch.device) -> None:
    def trained(*, graphs: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model, draws = nn.Linear(WIDTH, 1).to(device), np.random.default_rng(5)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            share = float(draws.beta(1.0, 1.0))
            optimizer.zero_grad()
            loss = model(share * x + (1 - share) * x.flip(0)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = sg.train_step(step, optimizers=optimizer) if graphs else step
        for x in torch.randn(6, 8, WIDTH, device=device):
            run(x)
        return model.weight.detach().clone(), draws.bit_generator.state

    (weight, state), (expected, after) = trained(graphs=True), trained(graphs=False)
    assert state == after
    torch.testing.assert_close(weight, expected)


def test_objects_that_do_not_tell_where_they_are_do_no_harm(device: torch.device, tmp_path: pathlib.Path) -> None:
    closed = (tmp_path / "empty").open("w")
    closed.close()
    held = [closed, random.SystemRandom(), np.zeros(1 << 20), collections.deque([iter(())]), numbers(), range(3)]
    model = sg.wrap(Advancing(held, lambda held: 2.0, quiet=False).to(device).eval(), capture_sizes=[3], progress=False)
    x = torch.randn(3, WIDTH, device=device)
    with torch.no_grad():
        for _ in range(6):
            torch.testing.assert_close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays >= 3, reasons(model)


@pytest.fixture
def written_total() -> Iterator[None]:
    """Let another thread go on writing the global number of this file."""
    stop = threading.Event()

    def write() -> None:
        global TOTAL
        while not stop.wait(0.0002):
            TOTAL += 1

    thread = threading.Thread(target=write)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.parametrize("upfront", [False, True])
def test_a_global_of_the_models_file_that_another_thread_writes_is_no_obstacle(
    upfront: bool, device: torch.device, written_total: None
) -> None:
    """A service counts its requests, or notes the time, beside the model: that made the model eager for ever."""

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.01)  # so that each run sees a write
            return x * 2

    model = sg.wrap(Plain().to(device).eval(), capture_sizes=[3], progress=False)
    xs = torch.randn(6, 3, WIDTH, device=device)
    with torch.no_grad():
        if upfront:
            model.capture_graphs(xs[0])
        for x in xs:
            torch.testing.assert_close(model(x), x * 2)
    assert model.graph_stats.replays > 0, reasons(model)
