"""A break that returns something of another kind at a replay: its call is finished eagerly where that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.errors import BreakError
from simplegraph.base.reasons import Reason
from tests.graph.breaks.models import Calls, piecewise

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.proofs]

PROVEN = 4  # calls, after which replays serve


class Choosing(nn.Module):
    """A linear, a break whose result's shape follows the values, and what is computed from that."""

    def __init__(self, choose: Callable[..., Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.first.weight)
        self.register_buffer("seen", torch.zeros(()))
        self.choose = choose
        self.before: Callable[[Choosing, Tensor], object] = lambda module, hidden: None
        self.after: Callable[[Choosing, Tensor], object] = lambda module, hidden: None

    def forward(self, x: Tensor) -> Tensor:
        Calls.forwards += 1
        hidden = self.first(x)
        self.before(self, hidden)
        chosen = self.choose(hidden)
        self.after(self, hidden)
        return hidden + total(chosen)


def total(chosen: Any) -> Any:
    if isinstance(chosen, (tuple, list)):
        return sum(map(total, chosen))
    if isinstance(chosen, Held):
        return total(chosen.tensor)
    return chosen.double().sum().float() if isinstance(chosen, Tensor) else chosen or 0


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        Calls.breaks += 1
        return function(*args)

    return sg.eager_break(run)


def model_of(module: nn.Module, device: torch.device, **settings: Any) -> Any:
    return piecewise(module, device, capture_sizes=[4], **settings)


def rows(count: int, device: torch.device) -> Tensor:
    """Four rows, of which so many are positive."""
    signs = torch.tensor([1.0] * count + [-1.0] * (4 - count)).unsqueeze(1)
    return (signs * torch.arange(1, 17).view(4, 4)).to(device)


def settle(model: Any, device: torch.device) -> None:
    for _ in range(PROVEN):
        model(rows(2, device))
    assert model.graph_stats.replays > 0


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a boolean mask": lambda x: x[x.sum(1) > 0],
    "unique": lambda x: torch.unique(x.sign()),
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a loop": lambda x: [row for row in x.clone() if row.sum() > 0],
    "a number": lambda x: int((x > 0).sum()),
    "a flag": lambda x: bool((x > 0).all()),
    "another dtype": lambda x: x * 2 if x[-1, 0] < 0 else x.double(),
    "nothing": lambda x: x * 2 if x[-1, 0] < 0 else None,
    "another structure": lambda x: x * 2 if x[-1, 0] < 0 else (x * 2, x * 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_call_is_finished_eagerly_and_its_size_runs_eagerly_from_then_on(kind: str, device: torch.device) -> None:
    module = Choosing(counted(KINDS[kind]))
    model = model_of(module, device)
    settle(model, device)
    replays = model.graph_stats.replays
    before = Calls.breaks, Calls.forwards
    x = rows(4, device)
    found = model(x)
    assert (Calls.breaks, Calls.forwards) == (before[0] + 1, before[1] + 1), "each break and the forward run once"
    torch.testing.assert_close(found, module(x), rtol=0, atol=0)
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] == 1
    for count in (1, 2, 3):
        torch.testing.assert_close(model(rows(count, device)), module(rows(count, device)), rtol=0, atol=0)
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] == 4
    assert model.graph_stats.replays == replays
    (said,) = model.graph_stats.failures.values()
    assert "returned" in said
    assert "hold everything up to where shapes are fixed again" in said


def test_a_break_that_holds_everything_until_shapes_are_fixed_is_served_at_any_count(device: torch.device) -> None:
    """The remedy that the message names."""
    module = Choosing(counted(lambda x: total(x[x.sum(1) > 0])))
    model = model_of(module, device)
    settle(model, device)
    before = model.graph_stats.replays
    for count in (4, 1, 3, 0):
        torch.testing.assert_close(model(rows(count, device)), module(rows(count, device)), rtol=0, atol=0)
    assert model.graph_stats.replays == before + 4


def test_other_sizes_are_served_on(device: torch.device) -> None:
    module = Choosing(counted(lambda x: x[x.sum(1) > 0]))
    model = piecewise(module, device, capture_sizes=[1, 4])
    settle(model, device)
    for _ in range(PROVEN):
        model(rows(4, device)[:1])
    model(rows(3, device))
    before = model.graph_stats.replays
    model(rows(4, device)[:1])
    assert model.graph_stats.replays == before + 1


def test_a_second_break_is_served_with_what_the_first_returned(device: torch.device) -> None:
    first, second = counted(lambda x: x * 2), counted(lambda x: x[x.sum(1) > 0])

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            doubled = first(x + 1)
            return total(second(doubled + x)) + first(doubled)

    module = Two()
    model = model_of(module, device)
    settle(model, device)
    before = Calls.breaks
    found = model(rows(4, device))
    assert Calls.breaks == before + 3
    torch.testing.assert_close(found, module(rows(4, device)), rtol=0, atol=0)


def test_results_that_are_too_large_to_be_kept_are_said_to_be(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simplegraph.program.program._KEPT_BYTES", 8)
    first, second = counted(lambda x: x * 2), counted(lambda x: x[x.sum(1) > 0])

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return total(second(first(x + 1) + x)) + x

    module = Two()
    model = model_of(module, device)
    settle(model, device)
    with pytest.raises(BreakError, match=r"cannot be finished eagerly: .* too large to be kept"):
        model(rows(4, device))
    torch.testing.assert_close(model(rows(4, device)), module(rows(4, device)), rtol=0, atol=0)


def test_what_breaks_returned_is_not_kept_after_a_replay(device: torch.device) -> None:
    model = model_of(Choosing(counted(lambda x: x * 2)), device)
    settle(model, device)
    (program,) = model.graph_manager.programs.values()
    assert [step.returned for step in program.breaks] == [None]


def test_a_write_after_the_break_is_done_once(device: torch.device) -> None:
    module = Choosing(counted(lambda x: x[x.sum(1) > 0]))
    module.after = lambda module, hidden: module.seen.add_(1)
    model = model_of(module, device)
    settle(model, device)
    model(rows(4, device))
    assert float(module.seen) == PROVEN + 1


def test_what_a_break_does_in_python_is_done_once(device: torch.device) -> None:
    written: list[int] = []
    model = model_of(Choosing(sg.eager_break(lambda x: written.append(len(written)) or x[x.sum(1) > 0])), device)
    settle(model, device)
    model(rows(4, device))
    model(rows(3, device))
    assert written == list(range(PROVEN + 2))


class Held:
    """An object that holds a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _writes_an_argument(x: Tensor) -> Tensor:
    chosen = x[x.sum(1) > 0]
    x.zero_()
    return chosen


EFFECTS: dict[str, tuple[Callable[[Choosing], None], Callable[[Tensor], Any], str]] = {
    "a segment writes": (
        lambda module: setattr(module, "before", lambda module, hidden: module.seen.add_(1)),
        KINDS["a boolean mask"],
        "was written by then",
    ),
    "a break writes": (
        lambda module: setattr(module, "choose", counted(lambda x: (module.seen.add_(1), x[x.sum(1) > 0])[1])),
        KINDS["a boolean mask"],
        "was written by then",
    ),
    "a segment draws": (
        lambda module: setattr(module, "before", lambda module, hidden: hidden.add_(torch.rand_like(hidden) * 0)),
        KINDS["a boolean mask"],
        "draws random numbers",
    ),
    "a break writes to its argument": (lambda module: None, _writes_an_argument, "writes to what it is passed"),
    "a break returns an object": (
        lambda module: None,
        lambda x: Held(x) if x[-1, 0] > 0 else x * 2,
        "a Held, which may hold what the break was passed",
    ),
    "a break returns a sparse tensor": (
        lambda module: None,
        lambda x: x.to_sparse() if x[-1, 0] > 0 else x * 2,
        "may hold what the break was passed",
    ),
    "a break returns a view": (lambda module: None, lambda x: x[: int((x > 0).sum()) // 4], "or a view of it"),
}


@pytest.mark.parametrize("kind", EFFECTS)
def test_what_cannot_be_repeated_is_an_error_that_says_so_once(kind: str, device: torch.device) -> None:
    prepare, choose, words = EFFECTS[kind]
    module = Choosing(counted(choose))
    prepare(module)
    model = model_of(module, device)
    settle(model, device)
    seen = float(module.seen)
    with pytest.raises(BreakError, match=f"(?s)This call cannot be finished eagerly: .*{words}.*hold everything"):
        model(rows(4, device))
    assert float(module.seen) - seen in (0, 1)
    before = model.graph_stats.eager[Reason.CAPTURE_FAILED]
    found = model(rows(3, device))
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] == before + 1
    torch.testing.assert_close(found, module(rows(3, device)), rtol=0, atol=0)


def test_a_padded_batch_is_finished_with_its_real_rows(device: torch.device) -> None:
    other: list[bool] = []
    module = Choosing(counted(lambda x: x.double() if other else x * 2))
    module.forward = lambda x: module.first(x) * 2 + module.choose(module.first(x))  # type: ignore[method-assign]
    model = model_of(module, device)
    for count in (4, 3, 4, 3, 3):
        model(rows(2, device)[:count])
    replays = model.graph_stats.replays
    model(rows(2, device)[:3])
    assert model.graph_stats.replays == replays + 1
    other.append(True)
    before, ran = rows(2, device)[:3], Calls.breaks
    found = model(before)
    assert Calls.breaks == ran + 1
    torch.testing.assert_close(found, module(before), rtol=0, atol=0)
    torch.testing.assert_close(model(rows(2, device)[:3]), module(rows(2, device)[:3]), rtol=0, atol=0)


def test_a_warmup_shows_that_calls_of_an_unproven_graph_can_be_finished(device: torch.device) -> None:
    module = Choosing(counted(KINDS["a boolean mask"]))
    model = model_of(module, device, verify=0)
    settle(model, device)
    before = Calls.breaks
    found = model(rows(4, device))
    assert Calls.breaks == before + 1
    torch.testing.assert_close(found, module(rows(4, device)), rtol=0, atol=0)
    torch.testing.assert_close(model(rows(3, device)), module(rows(3, device)), rtol=0, atol=0)


def test_errors_are_raised_where_that_is_asked_for(device: torch.device) -> None:
    module = Choosing(counted(KINDS["a boolean mask"]))
    model = model_of(module, device, on_capture_failure="raise")
    settle(model, device)
    with pytest.raises(BreakError, match=r"(?s)in place of.*hold everything.*reset_graphs"):
        model(rows(4, device))


def test_a_size_is_captured_again_after_reset_graphs(device: torch.device) -> None:
    model = model_of(Choosing(counted(KINDS["a boolean mask"])), device)
    settle(model, device)
    model(rows(4, device))
    model.reset_graphs()
    before = model.graph_stats.replays
    for _ in range(PROVEN):
        model(rows(4, device))
    assert model.graph_stats.replays > before


def test_a_wrapped_function_is_finished_too(device: torch.device) -> None:
    choose = counted(KINDS["a boolean mask"])

    def function(x: Tensor) -> Tensor:
        return total(choose(x * 2)) + x

    graphed = sg.wrap(function, mode="PIECEWISE", capture_sizes=[4], progress=False)
    settle(graphed, device)
    before = Calls.breaks
    torch.testing.assert_close(graphed(rows(4, device)), rows(4, device) + 272.0, rtol=0, atol=0)
    assert Calls.breaks == before + 1
    assert graphed.graph_stats.eager[Reason.CAPTURE_FAILED] == 1
