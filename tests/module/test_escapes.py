"""Modules that leave tensors in Python, outside their own attributes: no NaN in any place or answer, and a reason."""

from __future__ import annotations

import collections
import functools
import threading
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.errors import CaptureError
from simplegraph.base.reasons import Reason
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.usefixtures("inference_mode")

STEPS: list[Tensor] = []
RECENT: collections.deque[Tensor] = collections.deque(maxlen=2)
TABLES: dict[int, Tensor] = {}
HIDDEN: Tensor | None = None
LOCAL = threading.local()


ITEMS: list[Any] = [0.0]
ENTRIES: dict[str, dict[str, Any]] = {"deep": {"hidden": 0.0}}


class Holder:
    hidden: Any = 0.0


HOLDER = Holder()


class Slots:
    __slots__ = ("hidden",)


SLOTS = Slots()


class Net(nn.Module):
    """A linear layer that hands its result to a function beside it."""

    def __init__(self, beside: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(self.l(x)) * 2


def append_to_a_list(y: Tensor) -> Tensor:
    STEPS.append(y)
    return y


def append_to_a_deque(y: Tensor) -> Tensor:
    RECENT.append(y)
    return y


def set_a_global(y: Tensor) -> Tensor:
    global HIDDEN
    HIDDEN = y if HIDDEN is None or HIDDEN.shape != y.shape else y + HIDDEN / 2
    return HIDDEN


def set_a_slot(y: Tensor) -> Tensor:
    SLOTS.hidden = y
    return y


def set_a_thread_local(y: Tensor) -> Tensor:
    LOCAL.hidden = y
    return y


def set_an_item(y: Tensor) -> Tensor:
    ITEMS[0] = y + ITEMS[0] / 2
    return ITEMS[0]


def set_an_entry(y: Tensor) -> Tensor:
    ENTRIES["deep"]["hidden"] = y + ENTRIES["deep"]["hidden"] / 2
    return ENTRIES["deep"]["hidden"]


def set_an_attribute(y: Tensor) -> Tensor:
    HOLDER.hidden = y + HOLDER.hidden / 2
    return HOLDER.hidden


def closure() -> Callable[[Tensor], Tensor]:
    seen: list[Tensor] = []

    def keep(y: Tensor) -> Tensor:
        seen.append(y)
        return y + len(seen)

    keep.seen = seen  # type: ignore[attr-defined]
    return keep


def forget() -> None:
    global HIDDEN
    STEPS.clear()
    RECENT.clear()
    TABLES.clear()
    HIDDEN = None
    ITEMS[:] = [0.0]
    ENTRIES["deep"]["hidden"] = HOLDER.hidden = 0.0
    table.cache_clear()
    last_table.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_kept() -> Any:
    forget()
    yield
    forget()


KEEPERS: dict[Callable[[], Callable[[Tensor], Tensor]], Callable[[Any], list[Tensor]]] = {
    lambda: append_to_a_list: lambda keep: STEPS,
    lambda: append_to_a_deque: lambda keep: list(RECENT),
    lambda: set_a_global: lambda keep: [HIDDEN] if HIDDEN is not None else [],
    lambda: set_a_slot: lambda keep: [SLOTS.hidden],
    lambda: set_a_thread_local: lambda keep: [LOCAL.hidden],
    lambda: set_an_item: lambda keep: ITEMS,
    lambda: set_an_entry: lambda keep: list(ENTRIES["deep"].values()),
    lambda: set_an_attribute: lambda keep: [HOLDER.hidden],
    closure: lambda keep: keep.seen,
}
NAMES = ["list", "deque", "global", "slot", "thread_local", "item", "entry", "attribute", "closure"]


@pytest.mark.parametrize(("make", "kept_by"), KEEPERS.items(), ids=NAMES)
def test_what_a_forward_leaves_in_python_is_what_eager_leaves(
    make: Callable[[], Any], kept_by: Callable[[Any], list[Tensor]], device: torch.device
) -> None:
    xs = [torch.randn(2, 4, device=device) for _ in range(6)]
    keep = make()
    net = Net(keep).to(device).eval()
    expected = [net(x).clone() for x in xs]
    left = [tensor.clone() for tensor in kept_by(keep)]
    forget()
    again = make()
    net.beside = again
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    for x, y in zip(xs, expected, strict=True):
        torch.testing.assert_close(model(x), y)
    torch.testing.assert_close([tensor.clone() for tensor in kept_by(again)], left)
    assert model.graph_stats.captures == 0
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED]


@pytest.mark.parametrize(("make", "kept_by"), KEEPERS.items(), ids=NAMES)
def test_the_unwrapped_module_is_sound_after_refused_captures(
    make: Callable[[], Any], kept_by: Callable[[Any], list[Tensor]], device: torch.device
) -> None:
    keep = make()
    net = Net(keep).to(device).eval()
    net(torch.randn(4, 4, device=device))
    model = sg.wrap(net, capture_sizes=[4], progress=False)
    failed = model.capture_graphs(torch.randn(4, 4, device=device)).failed
    assert set(failed) == {"batch size 4"}
    assert not any(tensor.isnan().any() for tensor in kept_by(keep))
    assert not net(torch.randn(4, 4, device=device)).isnan().any()


@pytest.mark.parametrize("name", ["list", "deque", "global", "closure"])
def test_warmups_of_padded_sizes_leave_no_padded_rows_where_the_capture_is_refused(
    name: str, device: torch.device
) -> None:
    make, kept_by = list(KEEPERS.items())[NAMES.index(name)]
    xs = [torch.randn(rows, 4, device=device) for rows in (6, 2, 2, 5, 2, 6)]
    left = []
    for wrapped in (False, True):
        forget()
        keep = make()
        torch.manual_seed(0)
        net: Any = Net(keep).to(device).eval()
        if wrapped:
            net = sg.wrap(net, capture_sizes=[3, 6], progress=False)
        left.append([([y.clone() for y in (net(x), *kept_by(keep))]) for x in xs])
    torch.testing.assert_close(left[1], left[0])
    assert net.graph_stats.eager[Reason.CAPTURE_FAILED]


@pytest.mark.parametrize("reads_back", [False, True], ids=["escapes alone", "reads back"])
@pytest.mark.parametrize(("make", "kept_by"), list(KEEPERS.items())[:5], ids=NAMES[:5])
def test_a_second_try_leaves_no_padded_rows_though_its_call_raises(
    make: Callable[[], Any], kept_by: Callable[[Any], list[Tensor]], reads_back: bool, device: torch.device
) -> None:
    keep, raises = make(), threading.Event()

    def forward(y: Tensor) -> Tensor:
        if raises.is_set() and len(y) == 2:  # the padded rows of the second try are three
            raise LookupError("two rows")
        y = keep(y)
        return y * 2 if reads_back and float(y.sum()) > 0 else y

    model = sg.wrap(Net(forward).to(device).eval(), capture_sizes=[3], progress=False)
    for rows in (3, 2):  # the next call captures
        model(torch.randn(rows, 4, device=device))
    left = [(tensor, tensor.clone()) for tensor in kept_by(keep)]
    raises.set()
    with pytest.raises(LookupError):
        model(torch.randn(2, 4, device=device))
    assert model.graph_stats.failures
    assert [id(tensor) for tensor in kept_by(keep)] == [id(tensor) for tensor, _ in left]
    for tensor, value in left:
        torch.testing.assert_close(tensor, value)


def test_a_second_try_counts_no_call_where_the_forward_counts_its_calls(device: torch.device) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls: dict[str, int] = {}
            self.of_size: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if len(x) not in self.of_size:
                self.of_size[len(x)] = torch.arange(4.0, device=x.device)
            self.calls["all"] = self.calls.get("all", 0) + 1
            return x + self.of_size[len(x)]

    model = sg.wrap(Counts().eval(), capture_sizes=[16], progress=False)
    for rows in (7, 2, 2, 2, 7):  # the third would be the first replay
        model(torch.randn(rows, 4, device=device))
    assert model.calls == {"all": 5}
    assert set(model.of_size) == {7, 2}
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] == 3


@pytest.mark.parametrize("view", [False, True], ids=["itself", "a view"])
@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize(("make", "kept_by"), KEEPERS.items(), ids=NAMES)
def test_an_input_that_a_forward_leaves_in_python_is_the_last_calls(
    make: Callable[[], Any], kept_by: Callable[[Any], list[Tensor]], rows: int, view: bool, device: torch.device
) -> None:
    keep = make()
    given: Callable[[Tensor], Tensor] = (lambda x: x[1:]) if view else (lambda x: x)

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            keep(given(x))
            return x * 2

    model = sg.wrap(Keeps().to(device).eval(), capture_sizes=[4], progress=False)
    xs = [torch.randn(rows, 4, device=device) for _ in range(6)]
    seen = []
    for x in xs:
        torch.testing.assert_close(model(x), x * 2)
        seen.append([tensor.clone() for tensor in kept_by(keep)])
    forget()
    keep = make()
    for x, wanted in zip(xs, seen, strict=True):
        keep(given(x))
        torch.testing.assert_close([tensor.clone() for tensor in kept_by(keep)], wanted)
    assert model.graph_stats.replays == 0


def test_the_same_input_left_in_a_global_at_every_call_is_found_and_named(device: torch.device) -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            HOLDER.hidden = x
            return x * 2

    model, x, other = sg.wrap(Keeps().eval(), capture_sizes=[2], progress=False), *torch.randn(2, 2, 4, device=device)
    for _ in range(4):
        model(x)
    model(other)
    assert HOLDER.hidden is other
    (failure,) = model.graph_stats.failures.values()
    assert (
        "the global HOLDER of tests.module.test_escapes would keep a tensor that exists only inside the graph"
        in failure
    )


@pytest.mark.parametrize(("make", "kept_by"), KEEPERS.items(), ids=NAMES)
def test_a_capture_that_fails_for_another_reason_leaves_nothing_either(
    make: Callable[[], Any], kept_by: Callable[[Any], list[Tensor]], device: torch.device
) -> None:
    xs = [torch.randn(2, 4, device=device) for _ in range(5)]
    left = []
    for wrapped in (False, True):
        forget()
        keep = make()
        torch.manual_seed(0)
        net: Any = Net(lambda y, keep=keep: keep(y) * (1 if float(y.sum()) > 0 else 2)).to(device).eval()
        if wrapped:
            net = sg.wrap(net, capture_sizes=[2], progress=False)
        left.append([([y.clone() for y in (net(x), *kept_by(keep))]) for x in xs])
    torch.testing.assert_close(left[1], left[0])
    assert net.graph_stats.eager[Reason.CAPTURE_FAILED]


def test_empty_tensors_of_callers_stay_where_a_capture_with_an_empty_tensor_fails(device: torch.device) -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:
            empty = x[:0] * 2
            STEPS.append(empty)
            return x * float(x.sum()) + empty.sum() + more.sum()

    kept: list[Any] = [torch.zeros(0, device=device), {"deep": torch.zeros(0, 3, device=device)}]
    model = sg.wrap(Reads().eval(), capture_sizes=[2], progress=False)
    for _ in range(4):
        x, more = torch.randn(2, 4, device=device), torch.zeros(0, device=device)
        torch.testing.assert_close(model(x, more), x * x.sum())
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED]
    assert [t.shape for t in (kept[0], kept[1]["deep"])] == [(0,), (0, 3)]


def test_an_empty_tensor_is_no_memory_that_a_capture_left(
    device: torch.device,
) -> None:
    memory, seen = graph_device(device), []

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            empty = x[:0] * 2
            if memory.is_capturing():
                seen.append(memory.left_alive(model.graph_manager.pool))
            return torch.cat([x, empty]) * 2

    model = sg.wrap(Makes().eval(), capture_sizes=[2], progress=False)
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), x * 2)
    assert seen == [set()]


@functools.lru_cache(maxsize=8)
def table(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows, device=device)[:, None] / 7.0
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=1)
def last_table(rows: int, device: torch.device) -> Tensor:
    return torch.arange(rows, device=device)[:, None] / 7.0


def rotate(y: Tensor) -> Tensor:
    cos, sin = table(len(y), y.device)
    return y * cos + y.flip(-1) * sin


def look_up(y: Tensor) -> Tensor:
    if len(y) not in TABLES:
        TABLES[len(y)] = torch.arange(len(y), device=y.device)[:, None] / 7.0
    return y * TABLES[len(y)]


def rotate_by_the_last(y: Tensor) -> Tensor:
    return y * last_table(len(y), y.device)


@pytest.mark.parametrize("beside", [rotate, look_up, rotate_by_the_last])
def test_a_table_cached_by_size_is_filled_by_a_warmup_and_serves(
    beside: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    net = Net(beside).to(device).eval()
    model = sg.wrap(net, capture_sizes=[1, 2, 4, 8], progress=False, padding=False)
    assert model.capture_graphs(torch.randn(8, 4, device=device)).failed == {}
    for rows in (1, 2, 4, 8, 4, 2, 1):
        x = torch.randn(rows, 4, device=device)
        y = model(x)
        torch.testing.assert_close(y, net(x))
    assert model.graph_stats.replays == 7


def test_a_table_that_was_cached_under_a_capture_alone_is_not_kept(device: torch.device) -> None:
    net = Net(rotate).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    model(x)
    table.cache_clear()
    for _ in range(3):
        torch.testing.assert_close(model(x), net(x))


class Cyclic:
    def __init__(self, y: Tensor) -> None:
        self.y, self.itself = y, self


def test_a_cycle_is_no_escape(device: torch.device) -> None:
    def circle(y: Tensor) -> Tensor:
        return Cyclic(y).y + 1

    model = sg.wrap(Net(circle).to(device).eval(), capture_sizes=[1, 2], progress=False)
    assert model.capture_graphs(torch.randn(2, 4, device=device)).failed == {}
    x = torch.randn(2, 4, device=device)
    torch.testing.assert_close(model(x), (model.l(x) + 1) * 2)
    assert model.graph_stats.replays == 1


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_outputs_are_no_escape(outputs: str, device: torch.device) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = x * 2
            return {"y": y, "again": y, "view": y[:, :2], "input": x, "nested": [y + 1, (y.t(),)]}

    model = sg.wrap(Both().eval(), capture_sizes=[2, 4], progress=False, outputs=outputs)
    assert model.capture_graphs(torch.randn(4, 4, device=device)).failed == {}
    x = torch.randn(4, 4, device=device)
    torch.testing.assert_close(model(x)["nested"][0], x * 2 + 1)


class Context:
    """An object per call, as engines pass to their attention."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@sg.eager_break
def attention(q: Tensor, context: Context, more: dict[str, Any]) -> Tensor:
    return q + context.hidden + more["scale"]


def test_what_breaks_are_passed_is_no_escape(device: torch.device) -> None:
    def broken(y: Tensor) -> Tensor:
        return attention(y * 3, Context(y), {"scale": y.mean(1, keepdim=True), "kind": "causal"}) * 2

    net = Net(broken).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2, 4], progress=False, mode="piecewise")
    assert model.capture_graphs(torch.randn(4, 4, device=device)).failed == {}
    for rows in (2, 4, 2):
        x = torch.randn(rows, 4, device=device)
        torch.testing.assert_close(model(x), net(x))
    assert model.graph_stats.replays == 3


def test_what_a_segment_leaves_before_a_break_is_refused(device: torch.device) -> None:
    def broken(y: Tensor) -> Tensor:
        STEPS.append(y)
        return attention(y * 3, Context(y + 1), {"scale": 1.0})

    net = Net(broken).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False, mode="piecewise")
    for _ in range(4):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), net(x))
    assert model.graph_stats.captures == 0
    assert not any(tensor.isnan().any() for tensor in STEPS)


@sg.eager_break
def halves(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.tanh(), y.tanh() / 2


@pytest.mark.parametrize("last", [False, True], ids=["read", "returned"])
@pytest.mark.parametrize(("make", "kept_by"), KEEPERS.items(), ids=NAMES)
def test_what_a_break_returned_is_refused_where_a_forward_leaves_it(
    make: Callable[[], Any], kept_by: Callable[[Any], list[Tensor]], last: bool, device: torch.device
) -> None:
    xs = [torch.randn(2, 4, device=device) for _ in range(5)]
    left = []
    for wrapped in (False, True):
        forget()
        keep = make()
        torch.manual_seed(0)

        def broken(y: Tensor, keep: Any = keep) -> Tensor:
            one, other = halves(y)
            kept = keep(other)
            return one if last else one + kept

        net: Any = Net(broken).to(device).eval()
        if wrapped:
            net = sg.wrap(net, capture_sizes=[2], progress=False, mode="piecewise")
        left.append([([y.clone() for y in (net(x), *kept_by(keep))]) for x in xs])
    torch.testing.assert_close(left[1], left[0])
    assert net.graph_stats.captures == 0
    assert net.graph_stats.eager[Reason.CAPTURE_FAILED]


def test_the_error_names_the_place_and_one_size_does_not_spoil_the_others(device: torch.device) -> None:
    def keep_two(y: Tensor) -> Tensor:
        if len(y) == 2:
            STEPS.append(y)
        return y

    net = Net(keep_two).to(device).eval()
    model = sg.wrap(net, capture_sizes=[1, 2, 4], progress=False)
    summary = model.capture_graphs(torch.randn(4, 4, device=device))
    assert set(summary.failed) == {"batch size 2"}
    assert summary.captured == 2
    text = str(summary.failed["batch size 2"])
    assert "the global STEPS of tests.module.test_escapes would keep a tensor that exists only inside the graph" in text
    strict = sg.wrap(net, capture_sizes=[2], progress=False, on_capture_failure="raise")
    with pytest.raises(CaptureError, match="the global STEPS"):
        strict.capture_graphs(torch.randn(2, 4, device=device))


RECORDER = """
LAST = [None, None, None]
ALL = []

def record(y):
    LAST[1] = y
    ALL.append(y)
    return y
"""


@pytest.mark.parametrize("through", ["the file", "the function", "a function that calls it"])
def test_a_list_of_another_file_has_as_many_items_as_eager_leaves(through: str, device: torch.device) -> None:
    recorder: Any = types.ModuleType("recorder")
    exec(RECORDER, vars(recorder))
    record, by_file = recorder.record, lambda y: recorder.record(y)
    beside = {"the file": by_file, "the function": record, "a function that calls it": lambda y: record(y)}[through]
    net = Net(beside).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    for calls in range(1, 5):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), net.l(x) * 2)
        assert [type(item) for item in recorder.LAST] == [type(None), Tensor, type(None)]
        torch.testing.assert_close(recorder.LAST[1], net.l(x))
        assert len(recorder.ALL) == calls
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 2


def test_an_engines_forward_that_keeps_a_tensor_is_refused(device: torch.device) -> None:
    x, kept = torch.ones(4, device=device), []

    def forward(mode: Any, descriptor: Any) -> Tensor:
        kept.append(x[: descriptor.num_tokens] * 2)
        return kept[-1] + 1

    manager = sg.CudaGraphManager(device=graph_device(device), capture_sizes=[2, 4], progress=False)
    summary = manager.capture(forward)
    assert set(summary.failed) == {"batch size 2", "batch size 4"}
    assert "the variable kept in the closure of" in str(summary.failed["batch size 4"])
    assert not any(tensor.isnan().any() for tensor in kept)
    torch.testing.assert_close(manager.run(manager.dispatch(num_tokens=2), forward), x[:2] * 2 + 1)


def test_a_tensor_that_a_swallowed_exception_keeps_is_refused(device: torch.device) -> None:
    errors: list[BaseException] = []

    def swallow(y: Tensor) -> Tensor:
        try:
            raise KeyError(str(y.shape))
        except KeyError as error:
            errors.append(error)
        return y

    net = Net(swallow).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    failed = model.capture_graphs(torch.randn(2, 4, device=device)).failed["batch size 2"]
    assert "the variable errors in the closure of" in str(failed)
    assert len(errors) == 1  # of the warmup
    x = torch.randn(2, 4, device=device)
    torch.testing.assert_close(model(x), net(x))


class Notes:
    seen: ClassVar[list[Any]] = []


def note_copies(y: Tensor) -> Tensor:
    copies = [y.clone(), y + 1, y * 2]
    ITEMS.append((copies, "in a list"))
    Notes.seen = [*Notes.seen, (copies, "of a class")]
    return y


def test_notes_of_several_tensors_are_all_those_of_eager_calls(device: torch.device) -> None:
    ITEMS[:], Notes.seen = [], []
    net = Net(note_copies).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    for calls in range(1, 6):
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(model(x), net.l(x) * 2)
        for notes in (ITEMS, Notes.seen):
            assert len(notes) == calls
            torch.testing.assert_close(notes[-1][0], [net.l(x), net.l(x) + 1, net.l(x) * 2])
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 3


NOTEBOOK = """
LOG = []
def note(y):
    LOG.append(([y.clone(), y + 1], "in a list"))
    return y
"""


def test_a_list_that_nothing_leads_to_stays_the_global_that_it_is(device: torch.device) -> None:
    notebook: dict[str, Any] = {}
    exec(NOTEBOOK, notebook)
    table = dict.fromkeys(range(2_000)) | {2_000: notebook["note"]}  # too large for those who follow what code reaches
    net = Net(lambda y: table[2_000](y)).to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    for calls in range(1, 6):
        model(torch.randn(2, 4, device=device))
        assert len(notebook["LOG"]) == calls
