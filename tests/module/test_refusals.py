"""Calls that no graph serves for a reason that stays cost next to nothing, and are never taken for others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.call.signature import CallReader
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.python_effects import ModuleState
from simplegraph.program.host_modes import HostMode
from simplegraph.program.observe import MemoryObserver
from tests.module.functions import graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def read_back(m: Any, x: Tensor) -> Tensor:
    """A number that is read back to Python refuses captures of float32."""
    if x.dtype is torch.float32 and m.reads:
        x.sum().item()
    return x * 2


def refused(device: torch.device, calls: int = 4, function: Callable[..., Any] = read_back, **settings: Any) -> Any:
    model = graphed(device, function, **{"padding": False, **settings})
    model.reads = True
    for _ in range(calls):
        model(rows(4, device))
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 1
    return model


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the work around warmups and captures."""
    done: list[str] = []

    def note(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            done.append(f"{owner.__name__}.{name}")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(CallReader, "read")
    note(MemoryObserver, "__enter__")
    note(HostMode, "following")
    note(ModuleState, "__init__")
    note(CapturedState, "_survey")
    return done


@pytest.mark.parametrize("grad", [False, True])
def test_calls_after_a_failed_capture_are_not_even_read(device: torch.device, work: list[str], grad: bool) -> None:
    model = refused(device)
    assert "MemoryObserver.__enter__" in work
    with torch.set_grad_enabled(grad):
        model.requires_grad_(False)
        model(rows(4, device))
        work.clear()
        for _ in range(10):
            x = rows(4, device)
            assert torch.equal(model(x), x * 2)
    assert work == []
    assert model.graph_stats.eager == {Reason.FIRST_CALL: 1, Reason.CAPTURE_FAILED: 14}
    assert model.graph_stats.batch_sizes == {4: 15}
    assert "x.sum().item()" in model.graph_stats.details[Reason.CAPTURE_FAILED]


def test_a_constant_batch_is_captured_as_it_is_and_padded_once_another_size_came(device: torch.device) -> None:
    """One batch size leaves batch dimensions a guess: a graph of exactly these rows needs none."""
    model = graphed(device, lambda m, x: x * 2, capture_sizes=[1, 2, 4, 8], batch_dims={}, verify=0)
    for _ in range(6):
        x = rows(3, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.eager == {Reason.FIRST_CALL: 1}
    assert (model.graph_stats.captures, model.graph_stats.replays, model.graph_stats.padded_tokens) == (1, 5, 0)
    for size in (7, 7, 7, 5, 3):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.padded_tokens > 0


def test_a_constant_batch_is_served_although_two_dimensions_are_as_long(device: torch.device) -> None:
    model = graphed(device, lambda m, x, y: x @ y, capture_sizes=[1, 2, 4, 8], batch_dims={"args.0": 0}, verify=0)
    for _ in range(5):
        x, y = rows(3, device), rows(6, device, 5)
        torch.testing.assert_close(model(x, y), x @ y)
    assert model.graph_stats.replays >= 2


def test_images_in_lists_are_served_for_each_length_of_the_list(device: torch.device) -> None:
    """Detectors take a list of images, whose dimension of three is that of their colours."""
    model = graphed(device, lambda m, images: [image * 2 for image in images], capture_sizes=[1, 2, 4], batch_dims={})
    for _ in range(5):
        for count in (1, 2, 4):
            images = [rows(3, device) for _ in range(count)]
            assert all(torch.equal(found, image * 2) for found, image in zip(model(images), images, strict=True))
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays >= 3


@pytest.mark.parametrize(
    "other",
    [
        lambda device: rows(4, device).double(),
        lambda device: rows(8, device).double(),
        lambda device: rows(4, device, 5).half(),
    ],
)
def test_other_calls_of_the_module_are_captured_and_replayed(device: torch.device, other: Any) -> None:
    model = refused(device)
    for _ in range(4):
        x = other(device)
        assert torch.equal(model(x), x * 2)
        y = rows(4, device)
        assert torch.equal(model(y), y * 2)
    assert (model.graph_stats.captures, model.graph_stats.replays) == (1, 3)


def test_an_argument_of_another_value_is_another_call(device: torch.device) -> None:
    def function(m: Any, x: Tensor, reads: bool) -> Tensor:
        return x * x.sum().item() if reads else x * 3

    model = graphed(device, function, padding=False)
    for _ in range(4):
        model(rows(4, device), True)
    for _ in range(4):
        x = rows(4, device)
        assert torch.equal(model(x, False), x * 3)
        assert torch.equal(model(x, True), x * x.sum().item())
    assert model.graph_stats.replays >= 2


CHANGES: dict[str, tuple[Callable[[Any], contextlib.AbstractContextManager[Any]], Reason]] = {
    "eager": (lambda model: sg.eager(), Reason.SWITCHED_OFF),
    "training": (lambda model: _training(model), Reason.TRAINING),
    "gradients": (lambda model: torch.enable_grad(), Reason.GRAD),
    "an operator mode": (lambda model: MemoryObserver(), Reason.TRANSFORMED),
}


@contextlib.contextmanager
def _training(model: Any) -> Iterator[None]:
    model.train()
    yield
    model.eval()


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_going_on_around_the_call_is_the_reason_that_counts(device: torch.device, change: str) -> None:
    model = refused(device)
    context, reason = CHANGES[change]
    before = model.graph_stats.eager[reason]
    with context(model):
        x = rows(4, device).requires_grad_(reason is Reason.GRAD)
        result = model(x)
    assert result.requires_grad == (reason is Reason.GRAD)
    assert torch.equal(result, x * 2)
    assert model.graph_stats.eager[reason] == before + 1


REFUSED: dict[str, tuple[Callable[[torch.device], Any], Reason]] = {
    "opaque": (lambda device: (rows(4, device), object()), Reason.OPAQUE_ARGUMENT),
    "too large": (lambda device: (rows(40, device),), Reason.BATCH_TOO_LARGE),
    "empty": (lambda device: (rows(0, device),), Reason.EMPTY_BATCH),
    "no tensor": (lambda device: (3,), Reason.AMBIGUOUS_BATCH_DIM),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_form_of_a_call_refuses_is_read_once_and_other_forms_are_served(
    device: torch.device, case: str, work: list[str]
) -> None:
    make, reason = REFUSED[case]
    model = graphed(device, lambda m, x, *_: x * 2)
    model(*make(device))
    work.clear()
    for _ in range(5):
        args = make(device)
        assert torch.equal(torch.as_tensor(model(*args)), torch.as_tensor(args[0] * 2))
    assert work == []
    assert model.graph_stats.eager == {reason: 6}
    for _ in range(5):
        x = rows(4, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.replays >= 2
    model(*make(device))
    assert model.graph_stats.eager[reason] == 7


def test_a_module_that_wants_gradients_is_read_once(device: torch.device, work: list[str]) -> None:
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[4], progress=False)
    with torch.enable_grad():
        model(rows(4, device, 4))
        work.clear()
        assert model(rows(4, device, 4)).requires_grad
        assert work == []
        model.requires_grad_(False)
        assert not model(rows(4, device, 4)).requires_grad
    assert model.graph_stats.eager[Reason.GRAD] == 2


def test_parameters_that_want_gradients_are_the_reason_that_counts(device: torch.device) -> None:
    model = refused(device)
    with torch.enable_grad():
        model(rows(4, device))
        model.requires_grad_(False)
        model(rows(4, device))
        model.requires_grad_(True)
        model(rows(4, device))
    assert model.graph_stats.eager[Reason.GRAD] == 2


def test_another_default_device_or_setting_is_another_call(device: torch.device) -> None:
    model = refused(device)
    before = model.graph_stats.eager[Reason.FIRST_CALL]
    with torch.device("cpu" if device.type == "cuda" else device):
        model(rows(4, device))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision != "high" else "medium")
    try:
        model(rows(4, device))
    finally:
        torch.set_float32_matmul_precision(precision)
    assert model.graph_stats.eager[Reason.FIRST_CALL] == before + 2


def test_another_state_is_another_call(device: torch.device) -> None:
    model = refused(device, state_key=lambda module: module.reads)
    model.reads = False
    for _ in range(4):
        x = rows(4, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.replays == 3
    model.reads = True
    model(rows(4, device))
    assert model.graph_stats.replays == 3


def test_capture_graphs_tries_again_and_its_graph_serves_the_calls(device: torch.device) -> None:
    model = refused(device)
    model.reads = False
    assert model.capture_graphs(rows(8, device)).failed == {}
    before = model.graph_stats.replays
    model(rows(4, device))
    assert model.graph_stats.replays == before + 1


@pytest.mark.parametrize("reset", [lambda model: model.reset_graphs(), lambda model: model.configure_graphs()])
def test_starting_over_tries_again(device: torch.device, reset: Callable[[Any], object]) -> None:
    model = refused(device)
    model.reads = False
    reset(model)
    for _ in range(4):
        x = rows(4, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.replays >= 1


def test_a_size_is_tried_again_once_what_other_graphs_read_has_moved(device: torch.device) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        if len(x) == 4 and m.reads:
            x.sum().item()
        return x @ m.weight

    model = refused(device, function=function)
    for _ in range(3):
        model(rows(8, device))
    assert model.graph_stats.captures == 1
    for _ in range(3):
        model(rows(4, device))
    model.weight, model.reads = nn.Parameter(model.weight * 2), False
    x = rows(4, device)
    assert torch.equal(model(x), x @ model.weight)
    model(rows(8, device))
    for _ in range(4):
        x = rows(4, device)
        assert torch.equal(model(x), x @ model.weight)
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.replays >= 2


def test_upfront_sizes_that_were_not_captured_are_not_read(device: torch.device, work: list[str]) -> None:
    model = graphed(device, lambda m, x: x * 2, capture="upfront", padding=False)
    for _ in range(3):
        model(rows(4, device))
    work.clear()
    model(rows(4, device))
    assert work == []
    assert model.graph_stats.eager == {Reason.NOT_CAPTURED_UPFRONT: 4}
    model.capture_graphs(rows(8, device))
    model(rows(4, device))
    assert model.graph_stats.replays == 1


def test_eager_calls_of_two_threads_run_at_the_same_time(device: torch.device) -> None:
    meeting, begun = threading.Barrier(2, timeout=30), threading.Event()
    model = refused(device, function=lambda m, x: (x.sum().item(), begun.is_set() and meeting.wait(), x * 2)[2])
    begun.set()
    found = []

    def call() -> None:
        with torch.no_grad():
            x = rows(4, device)
            found.append(torch.equal(model(x), x * 2))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True, True]


def test_weights_can_be_swapped_although_their_models_calls_are_known_to_be_eager(device: torch.device) -> None:
    model = refused(device)
    weight = next(model.parameters())
    torch.utils.swap_tensors(weight, nn.Parameter(torch.zeros_like(weight), requires_grad=weight.requires_grad))
    assert not weight.any()
    x = rows(4, device)
    torch.testing.assert_close(model(x), x * 2)


def test_failures_of_other_settings_are_forgotten_with_them(device: torch.device) -> None:
    model = refused(device)
    assert model.graph_stats.failures
    model.configure_graphs(capture_sizes=[4], progress=False)
    assert not model.graph_stats.failures
    model.reads = False
    for _ in range(4):
        x = rows(4, device)
        assert torch.equal(model(x), x * 2)
    assert model.graph_stats.replays >= 2


def test_no_replay_is_promised_where_no_graph_can_serve(device: torch.device) -> None:
    class Changing(nn.Module):
        number = 0.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.number

    model: Any = sg.wrap(Changing().eval(), capture_sizes=[4], progress=False)
    with torch.no_grad():
        for call in range(12):
            model.number = float(call)
            model(torch.randn(4, 2, device=device))
    report = str(model.graph_report())
    assert "python_state" in report
    assert "still to run eagerly" not in report
