"""Bad input and failed captures: eager's answer or eager's error, a reason, and the next good call is right."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import CaptureError, ConfigError, InputError, Reason
from simplegraph.graph.failures import capture_error
from simplegraph.graph.select import graph_device
from simplegraph.nested import flatten

SIZES = [1, 2, 4, 8]
WIDTH = 6


@pytest.fixture(autouse=True)
def _nothing_left_behind(device: torch.device) -> Iterator[None]:
    graphs = graph_device(device)
    stream = graphs.current_stream()
    with torch.no_grad():
        yield
    assert graphs.current_stream() == stream
    assert not graphs.is_capturing()
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert gc.isenabled()


def capturing(x: Tensor) -> bool:
    return graph_device(x.device).is_capturing()


class Net(nn.Module):
    """A good forward, with whatever `trouble` does in the middle of it."""

    def __init__(self, trouble: Callable[[Tensor], Any] = lambda x: None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trouble = trouble

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.trouble(x)
        return y * 2


def wrapped(device: torch.device, trouble: Callable[[Tensor], Any] = lambda x: None, **settings: Any) -> Any:
    settings.setdefault("capture_sizes", SIZES)
    return sg.wrap(Net(trouble).to(device).eval(), progress=False, **settings)


def right(model: Any, x: Tensor) -> None:
    """A call gives what the layers alone compute, and random numbers still work."""
    torch.testing.assert_close(model(x), model.linear(x) * 2)
    torch.manual_seed(4)
    first = torch.rand(3, device=x.device)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(3, device=x.device), first)


def rows(count: int, device: torch.device) -> Tensor:
    return torch.randn(count, WIDTH, device=device)


def warm(model: Any, device: torch.device, sizes: tuple[int, ...] = (8, 4, 3, 2, 1), times: int = 3) -> None:
    """Enough calls to capture every size."""
    for _ in range(times):
        for size in sizes:
            right(model, rows(size, device))


# Faults that eager does not mind and a capture does.


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
    return torch.tensor([1.0] * WIDTH, device=x.device)


def reseeding(x: Tensor) -> Any:
    torch.manual_seed(17)


def exception(x: Tensor) -> Any:
    if capturing(x):
        raise LookupError("not while captured")


def out_of_memory(x: Tensor) -> Any:
    if capturing(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def swallowed(x: Tensor) -> Any:
    try:
        x.sum().item()
    except RuntimeError:
        return None


FAULTS: dict[Callable[[Tensor], Any], tuple[str, str]] = {
    item: ("return x.sum().item()", "torch.where"),
    branch: ("if x.sum() > 0:", "torch.where"),
    printed: ('return f"{x}"', "eager_break"),
    boolean_index: ("return x[x > 0]", "eager_break"),
    nonzero: ("return torch.nonzero(x)", "eager_break"),
    to_host: ('return x.to("cpu", copy=True).tolist()', "eager_break"),
    from_host: ("return torch.tensor([1.0] * WIDTH, device=x.device)", "outside the forward"),
    reseeding: ("", "eed outside"),
    exception: ('raise LookupError("not while captured")', "LookupError: not while captured"),
    out_of_memory: ("raise torch.OutOfMemoryError", "capture_sizes"),
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
    assert "Batch size 4 now runs eagerly; other sizes are unaffected." in caplog.text
    assert "capture_failed" in str(model.graph_report())


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
    faulty = [True]
    model = wrapped(device, lambda x: item(x) if faulty[0] and x.shape[0] == 4 else None, on_capture_failure="raise")
    with pytest.raises(CaptureError, match="batch size 4"):
        model.capture_graphs(rows(3, device))
    faulty.clear()
    faulty.append(False)
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
        self.runs: list[tuple[int, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append((x.shape[0], capturing(x)))
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
    module.tuned.clear()
    module.runs.clear()
    for size in (8, 4, 2, 1, 3):
        x = rows(size, device)
        assert torch.equal(model(x), x * 2)
    assert module.runs == [], "every call was a replay"
    assert model.graph_stats.failures == {}
    assert not model.graph_stats.eager


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


# Bad batches.


def settled(device: torch.device, **settings: Any) -> Any:
    model = wrapped(device, **settings)
    model.capture_graphs(rows(3, device))
    return model


def replayed(model: Any, device: torch.device) -> None:
    """The next good calls are replays, and right."""
    before = model.graph_stats.replays
    for size in (3, 8, 1):
        right(model, rows(size, device))
    assert model.graph_stats.replays == before + 3


def test_a_batch_above_every_size_runs_eagerly(device: torch.device) -> None:
    model = settled(device)
    for size in (9, 100):
        right(model, rows(size, device))
    assert model.graph_stats.eager == {Reason.BATCH_TOO_LARGE: 2}
    replayed(model, device)


@pytest.mark.parametrize("first", [True, False])
def test_an_empty_batch_is_eagers(device: torch.device, first: bool) -> None:
    model = wrapped(device) if first else settled(device)
    assert model(rows(0, device)).shape == (0, WIDTH)
    assert model.graph_stats.eager == {Reason.EMPTY_BATCH: 1}
    warm(model, device)
    replayed(model, device)


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_arguments_that_disagree_on_the_batch_are_eagers_answer_or_eagers_error(device: torch.device) -> None:
    model = sg.wrap(Two().eval(), capture_sizes=SIZES, progress=False)
    for size in (3, 4, 3, 4, 3):
        x, y = rows(size, device), rows(size, device)
        assert torch.equal(model(x, y), x + y)
    replays = model.graph_stats.replays
    assert replays >= 1
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(rows(3, device), rows(2, device))
    x, y = rows(3, device), rows(1, device)  # eager broadcasts
    for _ in range(3):
        assert torch.equal(model(x, y), x + y)
    assert model.graph_stats.replays == replays
    assert model.graph_stats.eager[Reason.BATCH_MISMATCH] == 4
    for size in (3, 4):
        x, y = rows(size, device), rows(size, device)
        assert torch.equal(model(x, y), x + y)
    assert model.graph_stats.replays == replays + 2


def test_a_changed_dtype_has_a_graph_of_its_own(device: torch.device) -> None:
    model = sg.wrap(Two().eval(), capture_sizes=SIZES, progress=False)
    for _ in range(4):
        for dtype in (torch.float32, torch.float64, torch.int64):
            for size in (3, 4):
                x, y = (rows(size, device) * 9).to(dtype), (rows(size, device) * 9).to(dtype)
                actual = model(x, y)
                assert actual.dtype == dtype
                assert torch.equal(actual, x + y)
    assert model.graph_stats.captures == 3


def test_a_dtype_that_the_weights_refuse_is_eagers_error(device: torch.device) -> None:
    model = settled(device)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="dtype"):
            model(rows(3, device).double())
    replayed(model, device)


def test_a_changed_rank_or_trailing_shape_is_eagers_answer_or_error(device: torch.device) -> None:
    model = settled(device)
    for shape in ((3, 2, WIDTH), (4, 5, WIDTH)):
        for _ in range(4):
            x = torch.randn(shape, device=device)
            torch.testing.assert_close(model(x), model.linear(x) * 2)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, WIDTH + 1, device=device))
    x = torch.randn(WIDTH, device=device)
    torch.testing.assert_close(model(x), model.linear(x) * 2)
    with pytest.raises(RuntimeError):
        model(torch.tensor(1.0, device=device))
    replayed(model, device)


def test_a_call_with_arguments_missing_or_too_many_is_eagers_error(device: torch.device) -> None:
    model = settled(device)
    x = rows(3, device)
    for args, kwargs in [((), {}), ((x, x), {}), ((x,), {"scale": 2}), ((None,), {}), (("text",), {})]:
        with pytest.raises((TypeError, RuntimeError, AttributeError)):
            model(*args, **kwargs)
    replayed(model, device)


def test_a_meta_tensor_is_eagers_error(device: torch.device) -> None:
    model = settled(device)
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(torch.empty(3, WIDTH, device="meta"))
    replayed(model, device)


@pytest.mark.parametrize(
    "sizes", [[], [0], [-1, 2], [1.5], ["2"], "12", 4, [True], [None]], ids=lambda sizes: repr(sizes)
)
def test_invalid_capture_sizes_are_refused_before_anything_runs(device: torch.device, sizes: Any) -> None:
    module = Net().to(device).eval()
    with pytest.raises(ConfigError, match="capture_sizes"):
        sg.wrap(module, capture_sizes=sizes)


def test_capture_sizes_above_the_token_limit_are_refused_and_odd_ones_put_in_order(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="max_num_tokens"):
        wrapped(device, capture_sizes=[1, 64], max_num_tokens=32)
    model = wrapped(device, capture_sizes=[8, 2, 8, 4, 2])
    assert model.capture_graphs(rows(3, device)).captured == 3
    replayed(model, device)


def test_capture_graphs_with_inputs_it_cannot_use_says_why_and_breaks_nothing(device: torch.device) -> None:
    model = wrapped(device)
    for args, words in [
        ((rows(0, device),), "no rows"),
        ((), "tensor"),
        ((torch.tensor(1.0, device=device),), "batch"),
    ]:
        with pytest.raises(InputError, match=words):
            model.capture_graphs(*args)
    with pytest.raises(InputError, match="eval"):
        model.train().capture_graphs(rows(3, device))
    assert model.eval().capture_graphs(rows(3, device)).captured == len(SIZES)
    replayed(model, device)


# What a forward returns.


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return self.what(x)


def test_a_forward_that_returns_none_is_replayed_for_what_it_does(device: torch.device) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros((), device=device))

        def forward(self, x: Tensor) -> None:
            self.total.add_(x.sum())

    module = Counts().eval()
    model = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    for turn in range(1, 8):
        assert model(torch.ones(4, 2, device=device)) is None
        assert module.total.item() == 8 * turn
    assert model.graph_stats.replays >= 4


class Custom:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("upfront", [False, True])
def test_a_generator_or_an_object_of_ones_own_is_returned_by_eager(device: torch.device, upfront: bool) -> None:
    def generator(x: Tensor) -> Any:
        yield x * 2
        yield x * 3

    lazy = sg.wrap(Returns(generator).eval(), capture_sizes=SIZES, progress=False)
    custom = sg.wrap(Returns(lambda x: Custom(x * 2)).eval(), capture_sizes=SIZES, progress=False)
    if upfront:
        lazy.capture_graphs(rows(3, device))
        custom.capture_graphs(rows(3, device))
    for _ in range(4):
        for size in (4, 3):
            x = rows(size, device)
            assert [torch.equal(one, x * factor) for one, factor in zip(lazy(x), (2, 3), strict=True)] == [True, True]
            assert torch.equal(custom(x).value, x * 2)
    for model in (lazy, custom):
        assert model.graph_stats.replays == 0
        assert model.graph_stats.eager[Reason.UNSUPPORTED_OUTPUT] >= 4


@pytest.mark.parametrize(
    "what",
    [
        lambda x: [],
        lambda x: {},
        lambda x: (x * 2, None, 3, "text", x.dtype),
        lambda x: {"hidden": x * 2, "extra": [x + 1, (x - 1, None)]},
        lambda x: (x * 2, x.shape[0]),
        lambda x: (x * 2, x.shape),
        lambda x: x.sum(),
        lambda x: x[:1] * 2,
        lambda x: (x, x),
        lambda x: x.t() * 2,
        lambda x: x[:, :0],
    ],
)
def test_odd_outputs_are_eagers(device: torch.device, what: Callable[[Tensor], Any]) -> None:
    module = Returns(what).eval()
    model = sg.wrap(module, capture_sizes=SIZES, padding=False, progress=False)
    for _ in range(4):
        for size in (4, 2, 3):
            x = rows(size, device)
            actual, expected = model(x), module(x)
            assert type(actual) is type(expected)
            actual, expected = flatten(actual), flatten(expected)
            assert actual[1] == expected[1]
            for one, other in zip(actual[0], expected[0], strict=True):
                assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def test_outputs_that_follow_the_batch_in_no_simple_way_are_never_cut_wrong(device: torch.device) -> None:
    for what in (lambda x: (x * 2, x.shape[0]), lambda x: x[: (x.shape[0] + 1) // 2], lambda x: (x * 2, x.shape)):
        module = Returns(what).eval()
        model = sg.wrap(module, capture_sizes=SIZES, progress=False)
        for _ in range(4):
            for size in (8, 3, 4, 5, 1):
                x = rows(size, device)
                torch.testing.assert_close(model(x), module(x), rtol=0, atol=0)


# Somebody else's capture.


def test_a_call_during_another_capture_is_recorded_there_and_counted(device: torch.device) -> None:
    graphs = graph_device(device)
    for calls_before in (0, 1, 4):
        model = wrapped(device)
        x = rows(4, device)
        for _ in range(calls_before):
            right(model, x)
        model.linear(x)
        pool = graphs.new_pool()
        with graphs.on_capture_stream():
            graphs.begin(pool)
            y = model(x)
            segment = graphs.end()
        for _ in range(2):
            x.normal_()
            segment.replay()
            torch.testing.assert_close(y, model.linear(x) * 2)
        assert model.graph_stats.eager[Reason.CAPTURING_ELSEWHERE] == 1
        warm(model, device, sizes=(4,))
        assert model.graph_stats.replays >= 1
        del y
        segment.reset()
        graphs.release_pool(pool)


def test_capture_graphs_during_another_capture_is_refused_and_breaks_neither(device: torch.device) -> None:
    graphs = graph_device(device)
    model, x = wrapped(device), rows(4, device)
    model.linear(x)
    pool = graphs.new_pool()
    with graphs.on_capture_stream():
        graphs.begin(pool)
        with pytest.raises(InputError, match="being captured"):
            model.capture_graphs(x)
        y = model.linear(x) * 2
        segment = graphs.end()
    x.normal_()
    segment.replay()
    torch.testing.assert_close(y, model.linear(x) * 2)
    assert model.capture_graphs(x).captured == len(SIZES)
    replayed(model, device)


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


# What the messages say.


@pytest.mark.parametrize(
    ("text", "cause", "remedy"),
    [
        ("CUDA error: operation not permitted when stream is capturing", "read back", "eager_break"),
        (
            "CUDA error: operation failed due to a previous error during capture",
            "read back",
            "eager_break",
        ),
        ("CUDA error: capturing stream has unjoined work", "not joined", "wait_stream"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "out of memory", "capture_sizes"),
        ("Offset increment outside graph capture encountered unexpectedly.", "generator", "eed outside"),
        (
            "CUDAGeneratorImpl::set_current_seed can be called during stream capture only if new seed is the same "
            "as the original seed.",
            "reseeded",
            "eed outside",
        ),
        ("Attempt to increase offset for a CUDA generator not in capture mode.", "generator", "attribute"),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
            "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True.",
            "host",
            "outside the forward",
        ),
    ],
)
def test_torchs_messages_become_a_cause_and_a_remedy(text: str, cause: str, remedy: str) -> None:
    error = capture_error(RuntimeError(text), "batch size 8")
    assert "batch size 8" in str(error)
    assert cause in str(error)
    assert remedy in str(error)
    assert text[:40] in str(error), "torch's own words stay"


@pytest.mark.parametrize(
    "text",
    [
        "unsupported head size: 80; expected 64 or 128",
        "the captured frame is too small",
        "no seed given",
        "generator must be a list",
        "expected pinned positions",
    ],
)
def test_the_users_own_message_is_not_mistaken_for_one_of_torchs(text: str) -> None:
    error = capture_error(RuntimeError(text), "batch size 8")
    assert f"RuntimeError: {text}" in str(error)
    assert "read back" not in str(error)
    assert "pinned memory" not in str(error)
    assert "reseeded" not in str(error)
