"""Forwards that return what no graph can: eager's answer."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from troubled import SIZES, rows

import simplegraph as sg
from simplegraph import Reason
from simplegraph.base.nested import flatten

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


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


# Classes that hold tensors and are a dict, a list, a tuple as well.


@dataclasses.dataclass
class Items(dict):
    logits: Tensor | None = None
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        dict.update(self, logits=self.logits, hidden=self.hidden)


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    """As transformers' outputs are: what is not None is an item, too, and both are set together."""

    loss: Tensor | None = None
    logits: Tensor | None = None

    def __post_init__(self) -> None:
        self.update({name: value for name, value in vars(self).items() if value is not None})

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@dataclasses.dataclass
class Listed(list):
    logits: Tensor | None = None


@dataclasses.dataclass
class Queued(collections.deque):
    logits: Tensor | None = None


class Ordered(collections.OrderedDict):
    extra: Any = None


class Pair(NamedTuple):
    one: Any
    other: Any


class Triple(Pair):
    """Has an attribute beside the fields."""

    def __new__(cls, one: Any, other: Any, third: Any) -> Triple:
        made = super().__new__(cls, one, other)
        made.third = third
        return made


class Unmade(Pair):
    @classmethod
    def _make(cls, _: Any) -> Any:
        raise RuntimeError("code of the user's ran to rebuild")


@dataclasses.dataclass
class Slotted:
    __slots__ = ("hidden", "logits")
    logits: Tensor

    def with_hidden(self, hidden: Tensor) -> Slotted:
        self.hidden = hidden
        return self


@dataclasses.dataclass
class Asking:
    logits: Tensor
    later: Tensor = dataclasses.field(init=False)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("code of the user's ran only to look")


def ordered(x: Tensor) -> Ordered:
    made = Ordered(logits=x * 2)
    made.extra = x * 3
    return made


def listed(x: Tensor) -> Listed:
    made = Listed()
    made.append(x * 2)
    made.logits = x * 3
    return made


def queued(x: Tensor) -> Queued:
    made = Queued()
    made.append(x * 2)
    made.logits = x * 3
    return made


def described(value: Any) -> Any:
    """Describe a value by its class, its items and its attributes; a tensor by its values."""
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, str):
        return value
    items = dict.items(value) if isinstance(value, dict) else enumerate(value) if hasattr(type(value), "index") else ()
    names = getattr(type(value), "__slots__", ()) or getattr(value, "__dict__", ())
    attributes = {name: described(getattr(value, name)) for name in names}
    return type(value).__name__, [(key, described(item)) for key, item in items], attributes


@pytest.mark.parametrize("upfront", [False, True])
@pytest.mark.parametrize(
    ("what", "replayed"),
    [
        (lambda x: Items(x * 2, x * 3), True),
        (lambda x: Fields(None, x * 2), True),
        (lambda x: [Fields(x * 3, x * 2)], True),
        (ordered, True),
        (lambda x: Unmade(x * 2, x * 3), True),
        (listed, False),
        (queued, False),
        (lambda x: Triple(x * 2, x * 3, x * 4), False),
        (lambda x: Slotted(x * 2).with_hidden(x * 3), False),
        (lambda x: Asking(x * 2), False),
    ],
)
def test_a_dataclass_that_is_a_container_too_is_returned_whole(
    device: torch.device, what: Callable[[Tensor], Any], replayed: bool, upfront: bool
) -> None:
    module = Returns(what).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    if upfront:
        model.capture_graphs(rows(4, device))
    for _ in range(4):
        for size in (4, 2, 3):
            x = rows(size, device)
            actual, expected = model(x), module(x)
            if isinstance(expected, Asking):
                assert torch.equal(actual.logits, expected.logits)
                continue
            assert described(actual) == described(expected)
    assert (model.graph_stats.replays > 0) is replayed
    assert (Reason.UNSUPPORTED_OUTPUT in model.graph_stats.eager) is not replayed


def test_a_dataclass_that_is_a_dict_may_be_passed_too(device: torch.device) -> None:
    class Reads(nn.Module):
        def forward(self, given: Fields) -> Tensor:
            return given.logits * given["loss"]

    module = Reads().eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for _ in range(4):
        for size in (4, 2):
            given = Fields(rows(size, device), rows(size, device))
            assert torch.equal(model(given), module(given))
    assert model.graph_stats.replays >= 3


def test_a_tuple_of_a_class_with_more_attributes_is_no_value(device: torch.device) -> None:
    """It would keep the tensors of every call, and be another signature each time."""

    class Reads(nn.Module):
        def forward(self, x: Tensor, given: Triple) -> Tensor:
            return x + given.one * given.third

    module = Reads().eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for _ in range(4):
        x, given = rows(4, device), Triple(rows(4, device), None, rows(4, device))
        assert torch.equal(model(x, given), module(x, given))
    assert model.graph_stats.eager[Reason.OPAQUE_ARGUMENT] == 4
