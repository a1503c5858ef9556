"""Arguments that are not tensors, and changed dtypes and shapes, never replay another call's graph."""

from __future__ import annotations

import array
import dataclasses
import decimal
import enum

import numpy as np
import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, Opaque, rows

pytestmark = pytest.mark.usefixtures("no_grad")


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float
    negate: bool = False


class Colour(enum.Enum):
    RED = 2.0
    BLUE = 3.0


class Scaled(nn.Module):
    """A non-tensor argument with a name and a default."""

    def forward(self, x, scale=1):
        return x * scale if isinstance(scale, (bool, int, float, complex)) else x


@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0),
        (0, False, 0.0),
        (0.0, -0.0),
        (2, 3),
        ("a", "b", None),
        (2.0, None),
        (Colour.RED, Colour.BLUE),
        (Options(1.0), Options(2.0), Options(1.0, negate=True)),
        (torch.float16, torch.float32),
        (float("inf"), float("-inf")),
        (1j, 1 + 1j),
        (b"a", "a"),
        (slice(0, 2), slice(0, 3)),
        (frozenset({1}), frozenset({True}), frozenset({1.0})),
        (frozenset({0.0, 1}), frozenset({-0.0, 1})),
        (np.float32(0.0), np.float32(-0.0)),
        (decimal.Decimal("0"), decimal.Decimal("-0"), decimal.Decimal("0.0")),
        ({1: "a"}, {True: "a"}, {1.0: "a"}),
        ({"k": {0: 1}}, {"k": {False: 1}}),
        ([1, True], [True, 1]),
        ((frozenset({1}),), (frozenset({True}),)),
    ],
    ids=repr,
)
def test_values_that_are_no_tensors_are_never_confused(device, values):
    """The forward's answer depends on the very value and its type."""
    seen = {}

    def answer(value):
        text = repr(value)
        return float(seen.setdefault(text, len(seen) + 1))

    for value in values:
        answer(value)

    class Valued(nn.Module):
        def forward(self, x, value):
            return x * answer(value)

    model = sg.wrap(Valued().eval(), capture_sizes=[4])
    for _ in range(4):
        for value in values:
            x = rows(4, device)
            assert torch.equal(model(x, value), x * answer(value)), value
            assert torch.equal(model(x, value=value), x * answer(value)), value
    assert model.graph_stats.replays > 3 * len(values)


@pytest.mark.parametrize("captured", [5, None, "text", 0.5, True])
@pytest.mark.parametrize("passed", [5, None, "text", 0.5, True])
def test_another_value_never_replays_the_graph_of_the_captured_one(device, captured, passed):
    class Valued(nn.Module):
        def forward(self, x, value):
            return x + len(repr(value))

    model = sg.wrap(Valued().eval(), capture_sizes=[4])
    x = rows(4, device)
    for _ in range(4):
        model(x, captured)
    assert torch.equal(model(x, passed), x + len(repr(passed)))


def test_a_tensor_in_place_of_a_value_and_back_is_as_in_eager(device):
    model = sg.wrap(Scaled().eval(), capture_sizes=[4])
    x = rows(4, device)
    scale = torch.tensor(3.0, device=device)
    for _ in range(4):
        assert torch.equal(model(x, 2), x * 2)
        assert torch.equal(model(x, scale), x)
        assert torch.equal(model(x, None), x)
        assert torch.equal(model(x), x)


class Uncomparable(float):
    """A number that compares and hashes as user code may: with an error."""

    def __hash__(self):
        raise RuntimeError("no hash")


@pytest.mark.parametrize(
    "scale", [np.full(1, 2.0), {2.0}, bytearray(b"\2"), Uncomparable(2), array.array("f", [2.0])], ids=type
)
def test_a_value_that_cannot_be_told_apart_runs_eagerly_and_says_why(device, scale):
    class Sized(nn.Module):
        def forward(self, x, scale):
            return x * float(max(scale) if hasattr(scale, "__iter__") else scale)

    model, x = sg.wrap(Sized().eval(), capture_sizes=[4]), rows(4, device)
    for _ in range(3):
        assert torch.equal(model(x, scale), x * 2)
    assert model.graph_stats.eager[sg.Reason.OPAQUE_ARGUMENT] == 3
    assert f"scale is a {type(scale).__name__}" in str(model.graph_report())
    for _ in range(3):
        assert torch.equal(model(x, 2), x * 2)
    assert model.graph_stats.replays == 2


def test_an_object_that_may_change_inside_runs_eagerly_with_a_reason(device):
    class Reads(nn.Module):
        def forward(self, x, box):
            return x * box.value

    model = sg.wrap(Reads().eval(), capture_sizes=[4])
    box = Opaque(1.0)
    for step in range(4):
        box.value = float(step)
        x = rows(4, device)
        assert torch.equal(model(x, box), x * step)
    assert reasons(model) == {"opaque_argument": 4}


def test_too_many_different_values_run_eagerly_and_are_right(device):
    model = sg.wrap(Scaled().eval(), capture_sizes=[4], max_signatures=3)
    x = rows(4, device)
    for _ in range(3):
        for scale in range(2, 8):
            assert torch.equal(model(x, scale), x * scale)
    assert reasons(model)["too_many_signatures"] == 9
    assert model.graph_stats.replays == 6


def test_not_a_number_as_an_argument_is_still_captured(device):
    class Filled(nn.Module):
        def forward(self, x, value):
            return torch.nan_to_num(x * value, nan=1.0)

    model = sg.wrap(Filled().eval(), capture_sizes=[4])
    for _ in range(4):
        assert torch.equal(model(rows(4, device), float("nan")), torch.ones(4, WIDTH, device=device))
    assert model.graph_stats.replays > 0


def test_a_changed_dtype_rank_or_trailing_shape_is_another_graph(device):
    model = sg.wrap(Scaled().eval(), capture_sizes=[4])
    makers = [
        lambda: rows(4, device),
        lambda: rows(4, device).double(),
        lambda: torch.randint(9, (4, WIDTH), device=device),
        lambda: rows(4, device, WIDTH + 1),
        lambda: rows(4, device, 2, WIDTH),
        lambda: rows(4, device, 1)[:, 0],
    ]
    for _ in range(3):
        for make in makers:
            x = make()
            assert torch.equal(model(x, 2), x * 2)
    assert len(model.graph_stats.graphs) == len(makers)


def test_a_number_stays_the_number_that_the_forward_was_passed(device):
    """As a key, as what something is divided by, and beyond 64 bits."""

    class Uses(nn.Module):
        def forward(self, x, t):
            return {t: x * (1 / t), "wide": x + float(t * 2**40 % 7)}

    module = Uses().to(device).eval()
    model = sg.wrap(module, capture_sizes=[2], max_signatures=8, progress=False)
    for t in (3, 3, 3, 3, 2**62 + 1, 2**62 + 1, 2**62 + 1, *range(5, 17), 3, 3):
        x = rows(2, device)
        result, expected = model(x, t), module(x, t)
        assert [type(key) for key in result] == [int, str]
        assert list(result) == [t, "wide"]
        close(result[t], expected[t])
        close(result["wide"], expected["wide"])
    with pytest.raises(ZeroDivisionError):
        model(rows(2, device), 0)
    assert model.graph_stats.replays >= 4


class InOrder(nn.Module):
    """Sees in which order its keyword arguments are passed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, first, **others):
        return self.linear(torch.cat([first, *others.values()], dim=1))


def test_the_order_of_arguments_that_no_parameter_names_is_another_graph(device):
    plain = InOrder().to(device).eval()
    model = sg.wrap(plain, capture_sizes=[4], verify=0)
    for call in range(12):
        first, a, b = (rows(4, device) for _ in range(3))
        others = {"a": a, "b": b} if call % 4 < 2 else {"b": b, "a": a}
        expected = plain.linear(torch.cat([first, *others.values()], dim=1))
        close(model(first=first, **others) if call % 2 else model(**others, first=first), expected)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 8


class Square(nn.Module):
    """Takes a matrix for each row, which may have as many rows as the batch."""

    def forward(self, x, matrix, scale=1):
        return torch.einsum("nw,nvw->nv", x, matrix) * scale


def test_what_calls_tell_of_batch_dimensions_holds_for_arguments_in_any_order(device):
    model = sg.wrap(Square().eval(), capture_sizes=[2, WIDTH], verify=0)
    for call, size in enumerate([2, 2, 2, WIDTH, WIDTH, WIDTH]):
        x, matrix = rows(size, device), torch.randn(size, WIDTH, WIDTH, device=device)
        given = {"x": x, "matrix": matrix, "scale": 1}
        order = sorted(given, reverse=bool(call % 2))
        close(model(**{name: given[name] for name in order}), torch.einsum("nw,nvw->nv", x, matrix))
    assert model.graph_stats.captures == 2
    assert Reason.AMBIGUOUS_BATCH_DIM not in model.graph_stats.eager


class Masked(nn.Module):
    """A second tensor that may be left out, and an option of plain values."""

    def forward(self, x, mask=None, scale=1.0):
        return (x if mask is None else x * mask) * scale


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((None,), {}), ((None, 1.0), {}), ((), {"mask": None}), ((), {"scale": 1.0}), ((), {"scale": 1.0, "mask": None})],
    ids=str,
)
def test_passing_a_default_is_the_same_as_leaving_it_out(device, capture, args, kwargs):
    """A padded call is replayed at once: its batch dimensions are known, and no further graph is captured."""
    model = sg.wrap(Masked().eval(), capture_sizes=[1, 2, 4], capture=capture, progress=False)
    model.capture_graphs(rows(4, device))
    for number in (3, 3, 1, 2):
        x = rows(number, device)
        assert torch.equal(model(x, *args, **kwargs), x)
    assert reasons(model) == {}
    assert (model.graph_stats.replays, model.graph_stats.captures) == (4, 3)


def test_a_form_of_call_that_was_not_captured_up_front_says_so(device):
    model = sg.wrap(Masked().eval(), capture_sizes=[1, 2, 4], capture="upfront", progress=False)
    model.capture_graphs(rows(4, device))
    for _ in range(2):
        model(rows(3, device), torch.ones(3, 1, device=device))
        model(rows(3, device), None, 2.0)
    assert reasons(model) == {"not_captured_upfront": 4}


def test_a_call_unlike_the_captured_ones_says_in_a_sentence_how_it_differs(device):
    model = sg.wrap(Masked().eval(), capture_sizes=[1, 2, 4], progress=False)
    model.capture_graphs(rows(4, device))
    model(rows(4, device), None, 2.0)
    said = model.graph_stats.details[Reason.FIRST_CALL]
    assert said == "compared with captured calls, scale changed from absent to 2.0"
    model.gain, model.bias, model.limits = 1, 2, (0, 1)
    model(rows(4, device))
    said = model.graph_stats.details[Reason.FIRST_CALL]
    assert said == "compared with captured calls, bias, gain and limits changed"
    assert str(model.graph_report()).count(f"({said})") == 1
