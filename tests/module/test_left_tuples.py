"""Forwards that leave a tuple of tensors in an attribute: graphs serve them as they serve one tensor."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.guard.value_check import ValueHolder
from simplegraph.guard.versions import dict_version
from tests.module.left_places import WIDTH, compare, compare_left, follow, pair

pytestmark = pytest.mark.usefixtures("no_grad")


class Policy(nn.Module):
    """A recurrent policy; `state` is None or the tuple that the cell returned."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state)
        h, _ = self.state
        return h * 2

    def left(self) -> Any:
        return self.state


class Written(Policy):
    """The user reads it after each call, and no call reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell.weight_ih[:WIDTH] @ x.t()
        self.state = torch.tanh(y.t()), y.t() * 2
        return x + 1


class Returned(Policy):
    def forward(self, x: Tensor) -> Any:
        self.state = self.cell(x, self.state)
        return self.state


class KeepsOne(Policy):
    """Passes one tensor on, and makes the other anew."""

    def forward(self, x: Tensor) -> Tensor:
        h, c = (x, x * 0) if self.state is None else self.state
        self.state = h, c + x * h
        return c + h


class WithNone(Policy):
    def forward(self, x: Tensor) -> Tensor:
        before = 0 if self.state is None else self.state[0]
        self.state = torch.tanh(x + before), None
        return x + before


class WithNumber(Policy):
    """Holds the rate of its decay beside the tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h, rate = (x, 0.5) if self.state is None else self.state
        self.state = torch.tanh(h * rate + x), rate
        return h * rate


class OfLayers(nn.Module):
    """A tuple for each layer, as stacked cells keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(2))
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        after = []
        for at, cell in enumerate(self.cells):
            after.append(cell(x, None if self.state is None else self.state[at]))
            x = after[-1][0]
        self.state = tuple(after)
        return x

    def left(self) -> Any:
        return self.state


class State(NamedTuple):
    h: Tensor
    c: Tensor | None = None


class Named(Policy):
    def forward(self, x: Tensor) -> Tensor:
        state = self.state
        self.state = State(*self.cell(x, None if state is None else (state.h, state.c)))
        return self.state.h + 1


class OfTorch(Policy):
    """Leaves what an operator with two results returns."""

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.state is None else x + self.state.values
        self.state = y.max(dim=1, keepdim=True)
        return y * 2


class Below(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policies = nn.ModuleList([Policy(), Named()])

    def forward(self, x: Tensor) -> Tensor:
        for policy in self.policies:
            x = policy(x)
        return x

    def left(self) -> Any:
        return [policy.state for policy in self.policies]


class Buffered(Policy):
    """Keeps a tensor, a buffer and a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.register_buffer("mean", torch.zeros(1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0, keepdim=True)
        self.state = self.cell(x - self.mean, self.state)
        self.last = self.state[0]
        return self.last * 2

    def left(self) -> Any:
        return [self.state, self.last, self.mean]


class InPlace(Policy):
    """Writes to a tensor of the tuple."""

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = x.clone(), x * 2
        h, c = self.state
        h.mul_(0.5).add_(x)
        self.state = h, torch.tanh(c + h)
        return h + c


class Twice(Policy):
    """Holds one tensor twice."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x if self.state is None else x + self.state[1])
        self.state = h, h
        return h * 2


class AsksForItsForm(Policy):
    """Asks what is there for nothing but its class and length."""

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.state) if isinstance(self.state, tuple) else 5
        self.state = x * 2, x * count
        return x * count


class ShiftRegister(Policy):
    """Passes tuples on, through no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: Any = None

    def forward(self, x: Tensor) -> Tensor:
        total = x if self.earlier is None else x + self.earlier[0]
        self.earlier, self.state = self.state, (x * 2, x * 3)
        return total

    def left(self) -> Any:
        return [self.state, self.earlier]


KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Policy, Written, Returned, KeepsOne, WithNone, WithNumber, OfLayers, Named, OfTorch, Below, InPlace, Twice),
        *(AsksForItsForm, ShiftRegister),
    )
}


def reset(*modules: Any) -> None:
    for module in modules:
        for child in module.modules():
            if "state" in vars(child):
                child.state = None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_calls_with_resets_leave_what_eager_leaves(
    kind: str, outputs: str, mode: Callable[[], Any], device: torch.device
) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2], outputs=outputs, progress=False, verify=4)
    with mode():
        for _ in range(3):
            follow(model, module, twin, [2] * 10, device)
            reset(module, twin)
    assert model.graph_stats.replays >= 12
    assert not model.graph_stats.failures


def test_a_buffer_and_a_tensor_beside_the_tuple_are_served_too(device: torch.device) -> None:
    module, twin = pair(Buffered, device)
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    follow(model, module, twin, [3] * 12, device)
    reset(module, twin)
    follow(model, module, twin, [3] * 12, device)
    assert model.graph_stats.replays >= 12


@pytest.mark.parametrize("kind", ["Policy", "OfLayers", "Named", "Below", "WithNumber"])
def test_states_of_two_sizes_are_padded_and_cut(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    for rows in (8, 4, 3, 5, 7, 3):
        reset(module, twin)
        follow(model, module, twin, [rows] * 8, device)
    replays = model.graph_stats.replays
    reset(module, twin)
    follow(model, module, twin, [3] * 6, device)
    assert model.graph_stats.replays >= replays + 4


def test_what_padded_batches_leave_has_their_rows(device: torch.device) -> None:
    module, twin = pair(Written, device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4, 8], progress=False)
    follow(model, module, twin, [8, 4, 8, 2, 4, *[3, 5, 7, 2, 8, 1, 4] * 4], device)
    assert model.graph_stats.replays >= 14


def test_a_state_of_another_batch_size_fails_as_eager_does_and_a_reset_goes_on(device: torch.device) -> None:
    module, twin = pair(Policy, device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    follow(model, module, twin, [2] * 6, device)
    for each in (model, twin):
        with pytest.raises(RuntimeError):
            each(torch.randn(4, WIDTH, device=device))
    compare_left(model, module, twin)
    reset(module, twin)
    follow(model, module, twin, [4] * 6, device)


@pytest.mark.parametrize("kind", ["Policy", "Written", "Named"])
def test_graphs_captured_up_front_leave_what_eager_leaves(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    assert model.capture_graphs(torch.randn(4, WIDTH, device=device)).captured == 2
    reset(module, twin)
    follow(model, module, twin, [2] * 8, device)
    assert model.graph_stats.replays >= 2


RESETS: dict[str, Callable[[Any, torch.device], Any]] = {
    "None": lambda m, device: setattr(m, "state", None),
    "a tuple of zeros": lambda m, device: setattr(
        m, "state", (torch.zeros(2, WIDTH, device=device), torch.ones(2, WIDTH, device=device))
    ),
    "one of its tensors": lambda m, device: setattr(m, "state", (torch.ones(2, WIDTH, device=device), m.state[1])),
    "in place": lambda m, device: m.state[0].zero_(),
    "rows in place": lambda m, device: m.state[1][:1].fill_(0.25),
    "its tensors swapped": lambda m, device: setattr(m, "state", m.state[::-1]),
    "one tensor twice": lambda m, device: setattr(m, "state", (m.state[0], m.state[0])),
    "a list": lambda m, device: setattr(m, "state", [*m.state]),
    "a named tuple": lambda m, device: setattr(m, "state", State(*m.state)),
    "the state of a submodule": lambda m, device: setattr(
        m, "state", (m.cell.weight_ih.detach()[:2], m.cell.weight_hh.detach()[:2])
    ),
    "a view of one tensor": lambda m, device: setattr(m, "state", tuple(torch.ones(2, 2, WIDTH, device=device))),
    "its data": lambda m, device: setattr(m.state[0], "data", torch.ones(2, WIDTH, device=device)),
}


@pytest.mark.parametrize("how", RESETS)
def test_a_users_reset_works(how: str, device: torch.device) -> None:
    module, twin = pair(Policy, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 8, device)
    for _ in range(6):
        for each in (module, twin):
            RESETS[how](each, device)
        follow(model, module, twin, [2] * 3, device)
    assert model.graph_stats.replays >= 12


@pytest.mark.parametrize("first", ["initial", "state"])
def test_an_initial_state_that_another_attribute_holds_is_never_stale(first: str, device: torch.device) -> None:
    class Initial(Policy):
        def __init__(self) -> None:
            super().__init__()
            tensors = torch.full((2, WIDTH), 0.3), torch.full((2, WIDTH), 0.4)
            if first == "initial":
                vars(self).pop("state")
            self.initial = tensors
            self.state = tensors

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.cell(x + self.initial[0], self.state)
            return self.state[0]

    module, twin = pair(Initial, device)
    for each in (module, twin):
        each.initial = tuple(tensor.to(device) for tensor in each.initial)
        each.state = each.initial
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for number in range(4):
        for each in (module, twin):
            if number == 2:
                each.initial = tuple(tensor + 1 for tensor in each.initial)
            each.state = each.initial
        follow(model, module, twin, [2] * 8, device)
    assert model.graph_stats.replays >= 10


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_a_tuple_that_the_user_keeps_stays_as_it_is_when_others_follow(outputs: str, device: torch.device) -> None:
    module, twin = pair(Policy, device)
    model: Any = sg.wrap(module, capture_sizes=[2], outputs=outputs, progress=False)
    kept: list[tuple[Any, Any]] = []
    for _ in range(12):
        compare(model, module, twin, torch.randn(2, WIDTH, device=device))
        kept.append((module.state, tuple(tensor.clone() for tensor in twin.state)))
    assert model.graph_stats.replays >= 8
    for own, expected in kept:
        assert type(own) is tuple
        torch.testing.assert_close(own, expected)
    assert len({id(own) for own, _ in kept}) == len(kept)
    assert len({tensor.data_ptr() for own, _ in kept for tensor in own}) == 2 * len(kept)


def test_a_copy_of_the_module_between_calls_has_a_state_of_its_own(device: torch.device) -> None:
    module, twin = pair(Policy, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 8, device)
    deep, deep_twin = copy.deepcopy(model), copy.deepcopy(twin)
    shallow, shallow_twin = copy.copy(model), copy.copy(twin)
    for _ in range(8):
        compare(deep, deep, deep_twin, torch.randn(2, WIDTH, device=device))
        compare(shallow, shallow, shallow_twin, torch.randn(2, WIDTH, device=device))
        compare(model, module, twin, torch.randn(2, WIDTH, device=device))
    for each in (model, deep):
        assert each.graph_stats.replays >= 4


def test_weights_that_move_between_replays_are_followed(device: torch.device) -> None:
    module, twin = pair(Named, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 6, device)
    for each in (module, twin):
        torch.manual_seed(7)
        each.cell.weight_ih = nn.Parameter(torch.randn(4 * WIDTH, WIDTH, device=device))
    follow(model, module, twin, [2] * 8, device)
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.replays >= 8


@pytest.mark.parametrize("kind", ["Policy", "Named", "Below"])
def test_a_function_and_a_method_leave_what_they_leave_in_their_module(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    run: Any = sg.wrap(lambda x: module(x) + 1, capture_sizes=[2], progress=False)
    for call in range(14):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(run(x), twin(x) + 1)
        compare_left(run, module, twin)
        if call == 9:
            reset(module, twin)
    assert run.graph_stats.replays >= 6
    assert run.graph_stats.recaptures == 0

    module, twin = pair(KINDS[kind], device)
    act: Any = sg.wrap(module.forward, capture_sizes=[2], progress=False)
    for _ in range(12):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(act(x), twin.forward(x))
        compare_left(act, module, twin)
    assert act.graph_stats.replays >= 6
    assert act.graph_stats.recaptures == 0


@pytest.mark.skipif(dict_version is None, reason="torch tells no versions of dicts")
@pytest.mark.parametrize("kind", ["Policy", "WithNumber", "Named", "OfLayers"])
def test_a_steady_replay_reads_no_plain_value_again(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 8, device)
    reads: list[str] = []
    read = ValueHolder.read
    monkeypatch.setattr(ValueHolder, "read", lambda self, opened: (reads.append(self.name), read(self, opened))[1])
    replays = model.graph_stats.replays
    follow(model, module, twin, [2] * 3, device)
    assert model.graph_stats.replays == replays + 3
    assert not reads


def test_a_number_in_the_tuple_that_changes_is_never_stale(device: torch.device) -> None:
    class Phases(Policy):
        """Does something else in every other call."""

        def forward(self, x: Tensor) -> Tensor:
            h, phase = (x, 0) if self.state is None else self.state
            self.state = h * 0.5 + x * phase, 1 - phase
            return h + phase

    module, twin = pair(Phases, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(3):
        follow(model, module, twin, [2] * 13, device)
        reset(module, twin)
    assert model.graph_stats.replays >= 15


def test_a_number_in_the_tuple_that_never_repeats_runs_eagerly_and_is_named(device: torch.device) -> None:
    class Counts(Policy):
        def forward(self, x: Tensor) -> Tensor:
            h, step = (x, 0) if self.state is None else self.state
            self.state = h * 0.5 + x, step + 1
            return h + step

    module, twin = pair(Counts, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 20, device)
    assert model.graph_stats.replays == 0
    assert "state took 4 new values within 32 calls ((Tensor, " in str(model.graph_report())


def test_a_tuple_that_is_filled_once_is_no_such_place(device: torch.device) -> None:
    class Cached(Policy):
        def forward(self, x: Tensor) -> Tensor:
            if self.state is None:
                self.state = torch.arange(WIDTH, device=x.device, dtype=x.dtype), x.new_ones(WIDTH)
            return x * self.state[0] + self.state[1]

    module, twin = pair(Cached, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 5, device)
    assert model.graph_stats.replays >= 3
    assert not model._graph_runner.carried.places
    for each in (module, twin):
        each.state = each.state[0] + 1, each.state[1]
    follow(model, module, twin, [2] * 5, device)


def test_a_state_as_wide_as_the_batch_is_declared(device: torch.device) -> None:
    module, twin = pair(Policy, device)
    model: Any = sg.wrap(module, capture_sizes=[WIDTH], progress=False)
    follow(model, module, twin, [WIDTH] * 6, device)
    assert model.graph_stats.replays == 0
    assert "self.state.0" in str(model.graph_report())
    reset(module, twin)
    model.configure_graphs(batch_dims={"self.state.0": 0, "self.state.1": 0, "x": 0})
    follow(model, module, twin, [WIDTH] * 8, device)
    assert model.graph_stats.replays >= 3


# What is refused.


def test_a_state_in_an_object_that_is_no_module_is_refused(device: torch.device) -> None:
    class Actor:
        """Holds its network, and is no module."""

        def __init__(self) -> None:
            self.network = Policy().to(device).eval()
            self.state: Any = None

        def act(self, x: Tensor) -> Tensor:
            self.state = self.network.cell(x, self.state)
            return self.state[0] * 2

    torch.manual_seed(0)
    actor = Actor()
    twin = copy.deepcopy(actor)
    act: Any = sg.wrap(actor.act, capture_sizes=[2], progress=False)
    for _ in range(8):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(act(x), twin.act(x))
        torch.testing.assert_close(actor.state, twin.state)
    assert act.graph_stats.replays == 0
    assert "keep it in an attribute of a module, alone or in a tuple" in "".join(act.graph_stats.failures.values())


def _list_in_place(m: Any, y: Tensor) -> None:
    m.kept[0] = y


def _new_list(m: Any, y: Tensor) -> None:
    m.kept = [y]


def _dict_in_place(m: Any, y: Tensor) -> None:
    m.table["last"] = (y, y + 1)


def _object(m: Any, y: Tensor) -> None:
    m.state = y, m.space


def _list_in_the_tuple(m: Any, y: Tensor) -> None:
    m.state[1].append(y)
    m.state = y, m.state[1]


REFUSED = {
    "list": _list_in_place,
    "new list": _new_list,
    "dict": _dict_in_place,
    "object": _object,
    "list in the tuple": _list_in_the_tuple,
}


@pytest.mark.parametrize("case", REFUSED)
def test_containers_that_are_changed_and_objects_are_refused_by_name(case: str, device: torch.device) -> None:
    class Leaves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.kept: list[Any] = [None]
            self.table: dict[str, Any] = {}
            self.space = types.SimpleNamespace()
            self.state: Any = (None, [])

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            REFUSED[case](self, y)
            return y * 2

    module, twin = pair(Leaves, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(6):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(model(x), twin(x))
        for name in ("kept", "table"):
            torch.testing.assert_close(getattr(module, name), getattr(twin, name))
        torch.testing.assert_close(module.state[0], twin.state[0])
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 3
    assert "would keep a tensor that exists only inside the graph" in "".join(model.graph_stats.failures.values())
