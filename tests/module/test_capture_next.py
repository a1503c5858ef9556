"""`capture_next` captures one size at a time, between requests that run eagerly until then."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, rows

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
SIZES = [8, 4, 2]


class Counting(nn.Module):
    """A layer that counts its rows on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.linear(x)


def twins(device: torch.device, module: nn.Module | None = None, **settings: Any) -> tuple[Any, nn.Module]:
    plain = (module or Counting()).to(device).eval()
    settings = {"capture_sizes": SIZES, "capture": "upfront", "padding": False, "progress": False} | settings
    return sg.wrap(copy.deepcopy(plain), **settings), plain


@pytest.mark.parametrize("capture", ["upfront", "lazy"])
@pytest.mark.parametrize("first", [(), (2,), (8,)], ids=["no call before", "a small call", "the largest"])
def test_a_size_at_a_time_the_largest_first_and_one_real_run_in_all(
    capture: str, first: tuple[int, ...], device: torch.device
) -> None:
    model, plain = twins(device, capture=capture)

    def called(*sizes: int) -> None:
        for size in sizes:
            x = rows(size, device)
            close(model(x), plain(x))
            assert torch.equal(model.seen, plain.seen)

    called(*first)
    ready: list[int] = []
    for size in SIZES:
        before = model.seen.clone()
        done = model.capture_next(rows(3, device))
        ran = not ready and not (first == (8,) and capture == "lazy")
        assert torch.equal(model.seen, before + 8 * ran)
        plain.seen.copy_(model.seen)
        assert (done.captured, done.failed) == (1, {})
        ready.append(size)
        replays = model.graph_stats.replays
        called(*ready, *ready)
        assert model.graph_stats.replays == replays + 2 * len(ready) - 1  # the new one's first call is its proof
        if capture == "upfront":
            called(*(other for other in SIZES if other not in ready))
    done = model.capture_next(rows(3, device))
    assert (done.captured, done.failed) == (0, {})
    assert torch.equal(model.seen, plain.seen)
    assert model.graph_stats.captures == len(SIZES)
    assert model.graph_stats.longest_stall == 0


class Picky(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item() if len(x) == 4 else x * 2


def test_a_size_that_fails_is_tried_once(device: torch.device) -> None:
    model, plain = twins(device, Picky())
    done = [model.capture_next(rows(8, device)) for _ in range(4)]
    assert [one.captured for one in done] == [1, 0, 1, 0]
    assert [len(one.failed) for one in done] == [0, 1, 0, 0]
    for size in SIZES * 3:
        x = rows(size, device)
        close(model(x), plain(x))
    assert set(reasons(model)) == {"capture_failed", "proof"}


def test_an_error_leaves_the_other_sizes_to_be_captured(device: torch.device) -> None:
    model, _ = twins(device, Picky(), on_capture_failure="raise")
    assert model.capture_next(rows(8, device)).captured == 1
    with pytest.raises(sg.CaptureError, match="item"):
        model.capture_next(rows(8, device))
    assert model.capture_next(rows(8, device)).captured == 1
    assert sorted(graph.size for graph in model.graph_stats.graphs.values()) == [2, 8]


class Limited(nn.Module):
    """Takes a few rows, or many, and counts its runs."""

    def __init__(self, fits: Any) -> None:
        super().__init__()
        self.fits = fits
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not self.fits(len(x)):
            raise ValueError(f"not {len(x)} rows")
        return self.linear(x)


@pytest.mark.parametrize(
    ("fits", "works"), [(lambda n: n < 5, [4, 2]), (lambda n: n > 2, [8, 4]), (lambda n: n == 4, [4])]
)
def test_a_size_that_the_module_cannot_run_does_not_stand_before_the_others(
    fits: Any, works: list[int], device: torch.device
) -> None:
    model, plain = twins(device, Limited(fits))
    done = [model.capture_next(rows(4, device)) for _ in range(4)]
    assert sorted(len(one.failed) for one in done) == sorted([1] * (3 - len(works)) + [0] * (1 + len(works)))
    assert sum(one.captured for one in done) == len(works)
    for size in works * 3:
        x = rows(size, device)
        close(model(x), plain(x))
    assert {graph.size for graph in model.graph_stats.graphs.values() if graph.replays} == set(works)


def test_idle_calls_change_nothing_and_never_switch_graphs_off(device: torch.device) -> None:
    model, plain = twins(device)
    for _ in range(6):
        for _ in SIZES:
            assert model.capture_next(rows(8, device)).captured == 1
        static = model.static_inputs(4)["x"]
        static.fill_(5.0)
        assert model.capture_next(torch.zeros(4, WIDTH, device=device)).captured == 0
        assert static.eq(5.0).all()
        for size in SIZES * 2:
            x = rows(size, device)
            close(model(x), plain(x))
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
        for each in (model, plain):
            each.linear.weight = weight
    assert model.graph_stats.recaptures >= 5
    assert "stale_too_often" not in reasons(model)


class PerSize(nn.Module):
    """Keeps a tensor for each batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(WIDTH, WIDTH), {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.full((1,), float(len(x)), device=x.device)
        return self.linear(x) + self.kept[len(x)]


def test_a_cache_that_requests_fill_delays_graphs_and_does_not_switch_them_off(device: torch.device) -> None:
    model, plain = twins(device, PerSize(), padding=True)
    for size in (3, 1, 7, 5, 2, 6, 4, 8):
        model.capture_next(rows(8, device))
        x = rows(size, device)
        close(model(x), plain(x))
    for _ in range(4):
        model.capture_next(rows(8, device))
    before = model.graph_stats.replays
    for size in (8, 4, 2, 8, 4, 2):
        x = rows(size, device)
        close(model(x), plain(x))
    assert model.graph_stats.replays > before
    assert "stale_too_often" not in reasons(model)


class Tallies(nn.Module):
    """Counts in Python at every run of more than three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += len(x) > 3
        return x * 2


@pytest.mark.parametrize("capture", ["upfront", "lazy"])
@pytest.mark.parametrize("first", [(), (2,), (2, 2, 2)], ids=["no call before", "one", "three"])
def test_what_only_large_batches_change_in_python_is_noticed(
    capture: str, first: tuple[int, ...], device: torch.device
) -> None:
    model, plain = twins(device, Tallies(), capture=capture, capture_sizes=[8, 2])
    for size in first:
        model(rows(size, device))
        plain(rows(size, device))
    done = model.capture_next(rows(3, device))
    assert done.captured == 0
    plain.runs = model.runs
    for size in (8, 2, 8, 2, 8):
        x = rows(size, device)
        close(model(x), plain(x))
        assert model.runs == plain.runs
    assert "forward changes `runs` whenever it runs" in str(next(iter(done.failed.values())))


def test_functions_and_lengths_have_it_and_training_steps_say_why_not(device: torch.device) -> None:
    function = sg.wrap(torch.no_grad()(lambda x: x.cumsum(1)), capture_sizes=[4, 2], capture="upfront", progress=False)
    assert [function.capture_next(rows(4, device)).captured for _ in range(3)] == [1, 1, 0]
    x = rows(4, device)
    for _ in range(3):
        close(function(x), x.cumsum(1))
    assert function.graph_stats.replays == 2
    of_lengths = sg.wrap(
        nn.ReLU().eval(), capture_sizes=[4, 2], length_dims={"input": 1}, lengths=[8, 16], progress=False
    )
    assert [of_lengths.capture_next(rows(4, device)).captured for _ in range(3)] == [2, 2, 0]
    step = sg.train_step(lambda x: x.sum(), optimizers=torch.optim.SGD([nn.Parameter(torch.zeros(2, device=device))]))
    with pytest.raises(sg.ConfigError, match="first calls are real steps"):
        step.capture_next(x)


def test_a_call_that_cannot_be_bound_says_so(device: torch.device) -> None:
    model, _ = twins(device)
    with pytest.raises(sg.InputError, match="capture_next cannot use this call"):
        model.train().capture_next(rows(3, device))
