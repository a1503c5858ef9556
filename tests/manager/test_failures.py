"""Failed captures: eager's answer, a reason, and the next good call is right."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from run_log import run_log
from torch import Tensor, nn
from troubled import SIZES, WIDTH, capturing, right, rows, warm, wrapped

import simplegraph as sg
from simplegraph import CaptureError, Reason
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def item(x: Tensor) -> Any:
    return x.sum().item()


def branch(x: Tensor) -> Any:
    if x.sum() > 0:
        return x


def printed(x: Tensor) -> Any:
    return f"{x}"


def boolean_index(x: Tensor) -> Any:
    return x[x > 0]


def nonzero(x: Tensor) -> Any:
    return torch.nonzero(x)


def to_host(x: Tensor) -> Any:
    return x.to("cpu", copy=True).tolist()


def from_host(x: Tensor) -> Any:
    # Of a later part of a second: whole ones leave no digits of a float32 for less than milliseconds.
    return torch.tensor([time.perf_counter() % 1e-3] * WIDTH, device=x.device)


def reseeding(x: Tensor) -> Any:
    torch.manual_seed(17)


def exception(x: Tensor) -> Any:
    if capturing(x):
        raise LookupError("not while captured")


def out_of_memory(x: Tensor) -> Any:
    if capturing(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def chained(x: Tensor) -> Any:
    try:
        x.sum().item()
    except RuntimeError as error:
        raise ValueError("no statistics") from error


def swallowed(x: Tensor) -> Any:
    try:
        x.sum().item()
    except RuntimeError:
        return None


FAULTS: dict[Callable[[Tensor], Any], tuple[str, str]] = {
    item: ("return x.sum().item()", "torch.where"),
    branch: ("if x.sum() > 0:", "torch.where"),
    printed: (
        'return f"{x}"',
        "Print its shape, or print outside the forward; or mark the function with @simplegraph.",
    ),
    boolean_index: ("return x[x > 0]", "Keep the shape: torch.where(mask, x, 0) for x[mask]"),
    nonzero: ("return torch.nonzero(x)", "use operations of fixed shape"),
    to_host: ('return x.to("cpu", copy=True).tolist()', "eager_break"),
    from_host: ("return torch.tensor([time.perf_counter() % 1e-3] * WIDTH", "pass its value as an argument"),
    reseeding: ("", "eed outside"),
    exception: ('raise LookupError("not while captured")', "LookupError: not while captured"),
    out_of_memory: ("raise torch.OutOfMemoryError", "capture_sizes"),
    chained: ("x.sum().item()", "torch.where"),
    swallowed: ("", "eager_break"),
}


PARAMETERS = [pytest.param(fault, *texts, id=fault.__name__) for fault, texts in FAULTS.items()]


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("fault", "source", "remedy"), PARAMETERS)
def test_a_forward_that_cannot_be_captured_runs_eagerly_and_says_why(
    device: torch.device, fault: Any, source: str, remedy: str, grad_mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = wrapped(device, fault)
    with grad_mode(), caplog.at_level(logging.WARNING, logger="simplegraph"):
        warm(model, device, times=4)
    stats = model.graph_stats
    assert stats.captures == stats.replays == 0
    assert stats.eager[Reason.CAPTURE_FAILED] >= 2 * len(SIZES)
    assert sorted(stats.failures) == [f"batch size {size}" for size in SIZES]
    message = stats.failures["batch size 4"]
    assert message.startswith("capturing batch size 4 failed")
    assert remedy in message
    if source and not (device.type == "cuda" and fault is swallowed):
        assert "test_failures.py:" in message
        assert source in message
    assert [record.message.count("now runs eagerly") for record in caplog.records if "failed" in record.message] == [1]
    said = "capture_failed: an earlier capture of this size, or of these shapes, failed (batch size "
    assert said in str(model.graph_report())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of failed captures."""
    return [
        record.message for record in caplog.records if record.levelno == logging.WARNING and "failed" in record.message
    ]


def test_one_bad_line_is_one_warning_for_all_sizes_that_it_stops(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = wrapped(device, branch)
    assert model.capture_graphs(rows(3, device)).captured == 0
    warm(model, device)
    (message,) = warnings_of(caplog)
    first, *_, last, more = message.splitlines()
    assert first.startswith("simplegraph: Net: capturing batch sizes 8, 4, 2, 1 failed at ")
    assert first.endswith("`if x.sum() > 0:`")
    assert last == "  Batch sizes 8, 4, 2, 1 now run eagerly; no other size was captured."
    assert more == f"  See: {Reason.CAPTURE_FAILED.command}"
    failed, remedy = str(model.graph_report()).splitlines()[-2:]
    assert failed.startswith("  failed: capturing batch sizes 8, 4, 2, 1 failed at ")
    assert remedy.startswith("    Test it on the device (torch.where), ")


def test_a_warning_says_how_many_other_sizes_were_captured(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped(device, lambda x: branch(x) if x.shape[0] > 2 else None).capture_graphs(rows(3, device))
    (message,) = warnings_of(caplog)
    *_, last, _ = message.splitlines()
    assert last == "  Batch sizes 8, 4 now run eagerly; 2 other sizes were captured."


def test_a_lazy_failure_claims_nothing_of_sizes_that_were_not_tried(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    warm(wrapped(device, branch), device)
    (message,) = warnings_of(caplog)
    *_, last, _ = message.splitlines()
    assert last == "  Batch size 4 now runs eagerly; other sizes with the same cause will, too."


def test_each_cause_has_a_warning_of_its_own(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    wrapped(device, lambda x: branch(x) if x.shape[0] > 2 else item(x)).capture_graphs(rows(3, device))
    assert ["if x.sum() > 0" in message for message in warnings_of(caplog)] == [True, False]
    assert ["batch sizes 8, 4 " in message for message in warnings_of(caplog)] == [True, False]


def test_tensors_of_a_capture_that_failed_are_freed(device: torch.device) -> None:
    made: list[weakref.ref[Tensor]] = []

    def trouble(x: Tensor) -> Any:
        kept_by_this_frame = x + 1
        made.append(weakref.ref(kept_by_this_frame))
        return kept_by_this_frame.sum().item()

    model = wrapped(device, trouble)
    assert len(model.capture_graphs(rows(3, device)).failed) == len(SIZES)
    assert [tensor() for tensor in made] == [None] * len(made)


def test_printing_the_summary_says_each_cause_once(device: torch.device) -> None:
    lines = str(wrapped(device, lambda x: branch(x) if x.shape[0] > 2 else None).capture_graphs(rows(3, device)))
    first, failed, remedy = lines.splitlines()
    assert first.startswith("2 of 4 graphs captured in ")
    assert failed.startswith("  failed: capturing batch sizes 8, 4 failed at ")
    assert remedy.startswith("    Test it on the device (torch.where), ")


@pytest.mark.parametrize(("fault", "source", "remedy"), PARAMETERS)
def test_a_fault_at_one_size_leaves_the_others_captured(
    device: torch.device, fault: Any, source: str, remedy: str
) -> None:
    model = wrapped(device, lambda x: fault(x) if x.shape[0] == 4 else None)
    warm(model, device, times=5)
    stats = model.graph_stats
    assert stats.captures == len(SIZES) - 1
    assert [*stats.failures] == ["batch size 4"]
    assert {graph.size: graph.replays > 0 for graph in stats.graphs.values()} == {1: True, 2: True, 8: True}


@pytest.mark.parametrize(("fault", "source", "remedy"), PARAMETERS)
def test_up_front_the_summary_names_what_failed_and_the_rest_replays(
    device: torch.device, fault: Any, source: str, remedy: str
) -> None:
    model = wrapped(device, lambda x: fault(x) if x.shape[0] == 2 else None)
    summary = model.capture_graphs(rows(3, device))
    assert summary.captured == 3
    assert [*summary.failed] == ["batch size 2"]
    assert remedy in str(summary.failed["batch size 2"])
    for size in (8, 4, 2, 1, 3, 7):
        right(model, rows(size, device))
    assert model.graph_stats.replays == 5
    assert model.graph_stats.eager == {Reason.CAPTURE_FAILED: 1}


@pytest.mark.parametrize(("fault", "source", "remedy"), PARAMETERS)
def test_asked_to_raise_it_raises_and_the_other_sizes_go_on(
    device: torch.device, fault: Any, source: str, remedy: str
) -> None:
    model = wrapped(device, lambda x: fault(x) if x.shape[0] == 2 else None, on_capture_failure="raise")
    x = rows(2, device)
    right(model, x)  # the warmup
    for _ in range(2):
        with pytest.raises(CaptureError) as caught:
            model(x)
        assert remedy in str(caught.value)
        assert source in (caught.value.location or source)
        for _ in range(4):
            right(model, rows(3, device))
    with pytest.raises(CaptureError, match="batch size 2"):
        model.capture_graphs(x)
    for size in (8, 4, 1, 5):
        right(model, rows(size, device))
    assert {graph.size for graph in model.graph_stats.graphs.values()} == {1, 4, 8}


def test_a_fault_that_went_away_is_captured_when_asked_again(device: torch.device) -> None:
    faulty = torch.ones(2000).numpy()  # of so large an array no value is part of the key
    model = wrapped(device, lambda x: item(x) if faulty[0] and x.shape[0] == 4 else None, on_capture_failure="raise")
    with pytest.raises(CaptureError, match="batch size 4"):
        model.capture_graphs(rows(3, device))
    faulty[0] = 0
    assert model.capture_graphs(rows(3, device)).failed == {}
    for size in (3, 4, 8):
        right(model, rows(size, device))
    assert model.graph_stats.replays == 3
    assert model.graph_stats.failures == {}, "the report speaks of what is, not of what was"
    assert "failed:" not in str(model.graph_report())


def test_the_users_own_exception_reaches_the_user_from_eager_calls(device: torch.device) -> None:
    class Mine(Exception):
        pass

    def fail(x: Tensor) -> None:
        if not capturing(x) and x.shape[0] == 4:
            raise Mine("in forward")

    model = wrapped(device, fail)
    for _ in range(3):
        with pytest.raises(Mine, match="in forward"):
            model(rows(4, device))
        right(model, rows(8, device))
        right(model, rows(5, device))
    assert model.graph_stats.replays >= 3


def test_an_exception_only_in_some_calls_never_breaks_the_others(device: torch.device) -> None:
    calls = [0]

    def fail(x: Tensor) -> None:
        calls[0] += 1
        if calls[0] in (1, 3, 5):
            raise ZeroDivisionError

    model = wrapped(device, fail)
    answered = 0
    for _ in range(12):
        x = rows(4, device)
        try:
            actual = model(x)
        except ZeroDivisionError:
            continue
        answered += 1
        torch.testing.assert_close(actual, model.linear(x) * 2)
    assert answered >= 9


@pytest.mark.parametrize("upfront", [False, True])
def test_keyboard_interrupt_during_capture_reaches_the_user_and_the_next_call_is_right(
    device: torch.device, upfront: bool
) -> None:
    interrupts = [True]

    def interrupt(x: Tensor) -> None:
        if capturing(x) and x.shape[0] == 2 and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt

    model = wrapped(device, interrupt)
    if upfront:
        with pytest.raises(KeyboardInterrupt):
            model.capture_graphs(rows(3, device))
    else:
        right(model, rows(2, device))
        with pytest.raises(KeyboardInterrupt):
            model(rows(2, device))
    for size in (8, 4, 2, 1, 3) * 3:
        right(model, rows(size, device))
    assert not interrupts
    assert model.graph_stats.failures == {}
    assert model.graph_stats.replays >= 5
    assert model.capture_graphs(rows(3, device)).failed == {}


@pytest.mark.parametrize("size", [8, 1])
def test_a_size_that_even_eager_refuses_costs_itself_only_up_front(device: torch.device, size: int) -> None:
    def fail(x: Tensor) -> None:
        if x.shape[0] == size:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = wrapped(device, fail)
    summary = model.capture_graphs(rows(3, device))
    assert [*summary.failed] == [f"batch size {size}"]
    with pytest.raises(torch.OutOfMemoryError):
        model(rows(size, device))
    for good in (4, 3, 2):
        right(model, rows(good, device))
    assert model.graph_stats.replays == 3


def test_a_failure_of_one_dtype_stays_in_the_report_when_another_is_captured(device: torch.device) -> None:
    class OnlyDouble(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.dtype is torch.float32:
                x.sum().item()
            return x * 2

    model = sg.wrap(OnlyDouble().eval(), capture_sizes=[4], progress=False)
    for dtype in (torch.float32, torch.float64):
        for _ in range(4):
            x = rows(4, device).to(dtype)
            assert torch.equal(model(x), x * 2)
    assert [*model.graph_stats.failures] == ["batch size 4"]
    assert model.graph_stats.captures == 1


class NeedsWarmup(nn.Module):
    """Like a kernel that tunes itself: the first run at a size must not be a captured one."""

    def __init__(self) -> None:
        super().__init__()
        self.tuned: dict[int, float] = {}
        self.runs = run_log()

    def forward(self, x: Tensor) -> Tensor:
        self.runs(x.shape[0], capturing(x))
        if x.shape[0] not in self.tuned:
            if capturing(x):
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            self.tuned[x.shape[0]] = 2.0
        return x * self.tuned[x.shape[0]]


def test_a_size_that_only_needs_a_warmup_of_its_own_is_captured_up_front(device: torch.device) -> None:
    module = NeedsWarmup().eval()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    summary = model.capture_graphs(rows(3, device))
    assert summary.failed == {}
    assert summary.captured == len(SIZES)
    module.runs().clear()
    for size in (8, 4, 2, 1, 3):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert module.runs() == [], "every call was a replay"
    assert model.graph_stats.failures == {}
    assert not model.graph_stats.eager


def test_what_other_code_empties_is_filled_again_and_graphs_serve_once_it_stays(device: torch.device) -> None:
    module = NeedsWarmup().eval()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    model.capture_graphs(rows(3, device))
    module.tuned.clear()
    for _ in range(60):  # five sizes fill it, which are more new values than are waited for at once
        replays = model.graph_stats.replays
        for size in (8, 4, 2, 1, 3):
            x = rows(size, device)
            assert torch.equal(model(x), x * 2)
    assert sorted(module.tuned) == [1, 2, 3, 4, 8]
    assert model.graph_stats.replays == replays + 5


def test_a_size_that_needs_a_warmup_of_its_own_is_captured_lazily(device: torch.device) -> None:
    model = sg.wrap(NeedsWarmup().eval(), capture_sizes=SIZES, progress=False)
    for _ in range(4):
        for size in (3, 8, 4, 1, 2, 7):
            x = rows(size, device)
            assert torch.equal(model(x), x * 2)
    assert model.graph_stats.captures == len(SIZES)
    assert model.graph_stats.failures == {}


def test_reseeding_with_the_seed_it_has_already_is_noticed_too(device: torch.device) -> None:
    # torch lets a capture reseed to the present seed, and the replay would go on instead of starting over.
    class Reseeds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return x + torch.rand_like(x)

    model = sg.wrap(Reseeds().eval(), capture_sizes=[4], progress=False)
    x = rows(4, device)
    torch.manual_seed(3)
    expected = x + torch.rand_like(x)
    for _ in range(6):
        assert torch.equal(model(x), expected)


def test_a_generator_of_the_modules_own_reseeded_in_the_forward_gives_eagers_numbers(device: torch.device) -> None:
    class Reseeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(device)

        def forward(self, x: Tensor) -> Tensor:
            self.generator.manual_seed(5)
            return x + torch.rand(x.shape, device=x.device, generator=self.generator)

    model = sg.wrap(Reseeds().eval(), capture_sizes=[4], progress=False)
    x = rows(4, device)
    expected = x + torch.rand(x.shape, device=device, generator=torch.Generator(device).manual_seed(5))
    for _ in range(6):
        assert torch.equal(model(x), expected)


def test_the_numbers_drawn_before_and_after_a_failed_capture_are_eagers(device: torch.device) -> None:
    def draws(x: Tensor) -> None:
        torch.rand(5, device=x.device)
        item(x)

    def run(model: Any) -> list[Tensor]:
        torch.manual_seed(8)
        results = []
        for size in (4, 4, 4, 2, 2, 2):
            model(torch.ones(size, WIDTH, device=device))
            results.append(torch.rand(3, device=device))
        return results

    model = wrapped(device, draws)
    expected = run(sg.unwrap(model))
    for one, other in zip(run(model), expected, strict=True):
        assert torch.equal(one, other)
    assert len(model.graph_stats.failures) == 2


def test_what_only_a_middle_size_reads_is_owned_and_watched(device: torch.device) -> None:
    class PerSize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = {size: torch.full((WIDTH,), float(size), device=device) for size in SIZES}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[x.shape[0]]

    module = PerSize().eval()
    model = sg.wrap(module, capture_sizes=SIZES, padding=False, progress=False)
    model.capture_graphs(rows(8, device))
    for _ in range(3):
        for size in SIZES:
            x = rows(size, device)
            assert torch.equal(model(x), x * size)
    for size in (4, 2, 8, 1):
        module.scales[size] = torch.full((WIDTH,), size + 100.0, device=device)
        torch.full((WIDTH,), float("nan"), device=device)
        for _ in range(4):
            x = rows(size, device)
            assert torch.equal(model(x), x * (size + 100))


def test_segments_before_a_break_are_dropped_although_the_error_is_kept(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    doubled = sg.eager_break(lambda y: y * 2)

    def forward(mode: Any, descriptor: Any) -> torch.Tensor:
        y = doubled(x + 1)
        return y * float(y.sum())

    graphs = graph_device(device)
    manager = sg.CudaGraphManager(
        device=graphs, mode="PIECEWISE", capture_sizes=[4], progress=False, on_capture_failure="raise"
    )
    with pytest.raises(sg.CaptureError) as error:
        manager.capture(forward)
    graphs.release_pool(manager.pool)  # refused while the pool has graphs
    assert "read back" in str(error.value)


EIGENVALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "eigh": lambda x: torch.linalg.eigh(x @ x.mT).eigenvalues,
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x @ x.mT),
    "eigvals": lambda x: torch.linalg.eigvals(x @ x.mT).abs(),
    "eig": lambda x: torch.linalg.eig(x @ x.mT).eigenvalues.abs(),
    "matrix_rank": lambda x: torch.linalg.matrix_rank(x @ x.mT, hermitian=True),
}


@pytest.mark.parametrize("name", EIGENVALUES)
@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_eigenvalues_are_refused_before_a_capture_breaks_the_solver(
    device: torch.device, name: str, upfront: bool, mode: Any
) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return EIGENVALUES[name](x)

    model: Any = sg.wrap(Spectrum().eval(), capture_sizes=[2, 4, 8], padding=False, progress=False)
    with mode():
        if upfront:
            assert len(model.capture_graphs(torch.randn(8, 5, 6, device=device)).failed) == 3
        for _ in range(3):
            x = torch.randn(4, 5, 6, device=device)
            torch.testing.assert_close(model(x), EIGENVALUES[name](x))
    assert model.graph_stats.replays == 0
    failures = model.graph_stats.failures.values()
    assert all("cuSOLVER waits for the device" in message for message in failures)
    assert all("test_failures.py:" in message for message in failures)
    assert failures


def test_an_engine_that_keeps_what_its_step_returns_is_told_its_attribute_and_where_to_keep_it(
    device: torch.device,
) -> None:
    class Engine:
        def __init__(self) -> None:
            self.model = nn.Linear(4, 4, device=device).requires_grad_(False)
            self.x, self.hidden = torch.randn(4, 4, device=device), None

        def step(self, mode: Any, descriptor: Any) -> Tensor:
            self.hidden = self.model(self.x[: descriptor.num_tokens])
            return self.hidden

    engine = Engine()
    manager = sg.CudaGraphManager(capture_sizes=[2, 4], device=device, progress=False)
    failed = manager.capture(engine.step).failed
    assert set(failed) == {"batch size 4", "batch size 2"}
    assert "the attribute hidden of a " in str(failed["batch size 4"])
    assert "keep what the call returns in the code that calls it" in str(failed["batch size 4"])
    manager.run(manager.dispatch(4), engine.step)
    torch.testing.assert_close(engine.hidden, engine.model(engine.x))
