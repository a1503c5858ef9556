"""A call that passes a default is read like one that leaves it out, but only where nobody can tell them apart."""

from __future__ import annotations

import decimal
import fractions
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close

pytestmark = pytest.mark.usefixtures("no_grad")

Call = Callable[[Any, Tensor], Any]


def serve(wrapped: Any, device: torch.device, calls: list[Call], twin: Any, times: int = 5) -> None:
    """Make calls in turns, and compare them with a twin's, as long as it takes until graphs serve them."""
    for _ in range(times):
        for call in calls:
            x = torch.randn(4, 3, device=device)
            close(call(wrapped, x), call(twin, x))


LEFT_OUT: Call = lambda m, x: m(x)  # noqa: E731
CALLS: list[Call] = [LEFT_OUT, lambda m, x: m(x, 2.0), lambda m, x: m(x, a=2.0), lambda m, x: m(x, a=3.0)]


def set_defaults(module: Any) -> None:
    type(module).forward.__defaults__ = (3.0,)


def replace_forward(module: Any) -> None:
    module.forward = lambda x, a=7.0: x + a


def replace_class_forward(module: Any) -> None:
    type(module).forward = lambda self, x, a=5.0, b=1.0: x - a * b


@pytest.mark.parametrize("change", [set_defaults, replace_forward, replace_class_forward])
def test_a_forward_with_other_defaults_is_read_by_them(device: torch.device, change: Callable[[Any], None]) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, a: float = 2.0) -> Tensor:
            return x * a

    module = Scaled().eval()
    wrapped = sg.wrap(module, progress=False)
    serve(wrapped, device, CALLS, module)
    change(module)
    serve(wrapped, device, CALLS, module)


def test_keyword_defaults_that_are_set_are_read(device: torch.device) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, a: float = 2.0) -> Tensor:
            return x * a

    module = Scaled().eval()
    wrapped = sg.wrap(module, progress=False)
    calls = [LEFT_OUT, CALLS[2], CALLS[3]]
    serve(wrapped, device, calls, module)
    forward: Any = Scaled.forward
    forward.__kwdefaults__["a"] = 3.0
    serve(wrapped, device, calls, module)


def test_a_function_with_other_defaults_is_read_by_them(device: torch.device) -> None:
    def scaled(x: Tensor, a: float = 2.0) -> Tensor:
        return x * a

    wrapped = sg.wrap(scaled, progress=False)
    serve(wrapped, device, CALLS, scaled)
    scaled.__defaults__ = (3.0,)
    serve(wrapped, device, CALLS, scaled)


def test_a_keyword_with_the_name_of_a_positional_argument_is_another_argument(device: torch.device) -> None:
    class Counting(nn.Module):
        def forward(self, x: Tensor, a: float = 1.0, /, **more: float) -> Tensor:
            return x * a + 100 * sum(more.values()) + 10 * len(more)

    module = Counting().eval()
    calls: list[Call] = [LEFT_OUT, lambda m, x: m(x, a=1.0), lambda m, x: m(x, 2.0), lambda m, x: m(x, a=2.0)]
    serve(sg.wrap(module, progress=False), device, calls, module)


def test_a_keyword_that_looks_like_one_of_more_arguments_is_another_argument(device: torch.device) -> None:
    class Summing(nn.Module):
        def forward(self, x: Tensor, *args: float, **more: float) -> Tensor:
            return x + sum(args) + 100 * len(more)

    module = Summing().eval()
    calls: list[Call] = [lambda m, x: m(x, 2.0), lambda m, x: m(x, **{"args.0": 2.0})]
    serve(sg.wrap(module, progress=False), device, calls, module)


class Scaling(nn.Module):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale


def filled_in(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Give a forward another default than it has."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return forward(self, *args, **{"scale": 5.0, **kwargs})

    return run


class Decorated(Scaling):
    forward = filled_in(Scaling.forward)


def hooked_before() -> nn.Module:
    module = Scaling()
    module.register_forward_pre_hook(lambda _, args, kwargs: (args, {"scale": 5.0, **kwargs}), with_kwargs=True)
    return module


def hooked_after() -> nn.Module:
    module = Scaling()
    module.register_forward_hook(lambda _, args, kwargs, result: result + 100 * len(kwargs), with_kwargs=True)
    return module


@pytest.mark.parametrize("make", [Decorated, hooked_before, hooked_after])
def test_code_that_sees_if_an_argument_was_passed_gets_what_was_passed(
    device: torch.device, make: Callable[[], nn.Module]
) -> None:
    module = make().eval()
    calls: list[Call] = [LEFT_OUT, lambda m, x: m(x, scale=1.0)]
    wrapped = sg.wrap(module, progress=False)
    serve(wrapped, device, calls, module)
    assert wrapped.graph_stats.replays


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        return type(other) is Unshown

    def __hash__(self) -> int:
        return 1


class UnshownText(str):
    __slots__ = ()
    __repr__ = Unshown.__repr__


class UnshownFraction(fractions.Fraction):
    __repr__ = Unshown.__repr__


class UnshownDecimal(decimal.Decimal):
    __repr__ = Unshown.__repr__


@pytest.mark.parametrize(
    "value",
    [10**5000, Unshown(), UnshownText("a"), UnshownFraction(1, 2), UnshownDecimal("1.5")],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_that_cannot_be_written_as_text_is_served(device: torch.device, value: Any) -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor, a: Any, b: Any = value) -> Tensor:
            return x * 2

    module = Double().eval()
    wrapped = sg.wrap(module, progress=False)
    serve(wrapped, device, [lambda m, x: m(x, value), lambda m, x: m(x, value, value)], module)
    assert str(wrapped.graph_report())


def test_names_that_no_terminal_shows_are_escaped_in_the_report(device: torch.device) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values: dict[str, float] = {}

        def forward(self, x: Tensor) -> Tensor:
            return x * next(iter(self.values.values()))

    module = Keyed().eval()
    wrapped = sg.wrap(module, progress=False)
    for number in (1.0, 2.0):
        module.values = {"\ud800": number, "a\nb": number, "\x1b[31m": number}
        serve(wrapped, device, [LEFT_OUT], module)
    report = str(wrapped.graph_report())
    assert r"values.\ud800 1.0" in report
    assert report.encode()
    assert "\x1b" not in report
