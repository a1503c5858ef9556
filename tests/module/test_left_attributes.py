"""Forwards that leave a tensor in an attribute: graphs serve them, and users find there what eager would have left."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.guard.value_check import ValueHolder
from simplegraph.guard.versions import dict_version
from tests.module.left_places import WIDTH, compare, compare_left, follow, pair

pytestmark = pytest.mark.usefixtures("no_grad")


class Base(nn.Module):
    """A linear layer; `hidden` is what the forward leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hidden: Any = None

    def left(self) -> list[Any]:
        return [self.hidden]


class Written(Base):
    """The user reads it after each call."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.hidden = torch.tanh(y)
        return y * 2


class Returned(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.linear(x)
        return self.hidden


class PartOfTheResult(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.hidden = y[:, 1:]
        return y


class TheInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = x
        return self.linear(x)


class OfAParameter(Base):
    """A view of memory that no run makes."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.linear.weight.t()
        return x @ self.hidden


class Recurrent(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.hidden is not None:
            y = y + 0.5 * self.hidden
        self.hidden = torch.tanh(y)
        return y * 2


class NeverInitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if hasattr(self, "before"):
            y = y + self.before
        self.before = torch.tanh(y)
        return y

    def left(self) -> list[Any]:
        return [getattr(self, "before", None)]


class Spiking(nn.Module):
    """Keeps its membrane in a buffer that it assigns, of the shape of its input, as snntorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("membrane", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.membrane.shape != x.shape:
            self.membrane = torch.zeros_like(x)
        self.membrane = 0.9 * self.membrane + self.linear(x)
        spikes = (self.membrane > 0.5).to(x.dtype)
        self.membrane = self.membrane - spikes
        return spikes

    def left(self) -> list[Any]:
        return [self.membrane]


class ShiftRegister(Base):
    """What one attribute held goes to another one, through no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        total = y if self.earlier is None else y + self.earlier
        self.earlier, self.hidden = self.hidden, y
        return total

    def left(self) -> list[Any]:
        return [self.hidden, self.earlier]


class Shapes(Base):
    """Asks what is there for nothing but its shape."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.hidden is not None and self.hidden.shape[0] > 3:
            y = y * 100
        self.hidden = y + 1
        return y


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.h: Any = None
        self.c: Any = None

    def forward(self, x: Tensor) -> Tensor:
        state = None if self.h is None else (self.h, self.c)
        self.h, self.c = self.cell(x, state)
        return self.h * 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([Cell(), Cell()])

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            x = cell(x)
        return x

    def left(self) -> list[Any]:
        return [state for cell in self.cells for state in (cell.h, cell.c)]


class Updated(Base):
    """Writes into the tensor that it left, and replaces it in other calls."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.hidden is None:
            self.hidden = y.clone()
        else:
            self.hidden = self.hidden.mul_(0.5).add_(y) + 0
        return y + self.hidden


KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(
            Written,
            Returned,
            PartOfTheResult,
            TheInput,
            OfAParameter,
            Recurrent,
            NeverInitialised,
            Spiking,
            ShiftRegister,
            Nested,
        ),
        Updated,
    )
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_leaves_what_eager_leaves(
    kind: str, outputs: str, mode: Callable[[], Any], device: torch.device
) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2], outputs=outputs, progress=False, verify=4)
    with mode():
        follow(model, module, twin, [2] * 16, device)
    assert model.graph_stats.replays >= 8
    assert not model.graph_stats.failures


@pytest.mark.parametrize("kind", ["Written", "Returned", "PartOfTheResult", "TheInput"])
def test_what_padded_batches_leave_has_their_rows(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4, 8], progress=False)
    follow(model, module, twin, [8, 4, 8, 2, 4, *[3, 5, 7, 2, 8, 6, 1, 4] * 4], device)
    assert model.graph_stats.replays >= 16


@pytest.mark.parametrize("kind", ["Recurrent", "Nested", "Spiking"])
def test_states_of_padded_batches_are_padded_and_cut(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    for rows in (8, 4, 3, 5, 7, 3):
        for each in (module, twin):
            reset(each)
        follow(model, module, twin, [rows] * 8, device)
    replays = model.graph_stats.replays
    for each in (module, twin):
        reset(each)
    follow(model, module, twin, [3] * 6, device)
    assert model.graph_stats.replays >= replays + 4


def reset(module: Any) -> None:
    for child in module.modules():
        for name in ("hidden", "h", "c"):
            if name in vars(child):
                setattr(child, name, None)
        if "membrane" in child._buffers:
            child.membrane = torch.zeros(0, device=child.membrane.device)


RESETS: dict[str, Callable[[Any, torch.device], Any]] = {
    "None": lambda m, device: setattr(m, "hidden", None),
    "zeros": lambda m, device: setattr(m, "hidden", torch.zeros(2, WIDTH, device=device)),
    "filled in place": lambda m, device: m.hidden.fill_(0.25),
    "zero_": lambda m, device: m.hidden.zero_(),
    "detach_": lambda m, device: m.hidden.detach_(),
    "another dtype": lambda m, device: setattr(m, "hidden", m.hidden.to(torch.float64)),
    "transposed": lambda m, device: setattr(m, "hidden", torch.ones(WIDTH, 2, device=device).t()),
    "one row for all": lambda m, device: setattr(m, "hidden", torch.ones(1, WIDTH, device=device)),
    "a row of it": lambda m, device: setattr(m, "hidden", m.hidden[:1].expand(2, WIDTH)),
    "a parameter": lambda m, device: setattr(m, "hidden", m.linear.weight.detach()[:2]),
    "its data": lambda m, device: setattr(m.hidden, "data", torch.ones(2, WIDTH, device=device)),
}


@pytest.mark.parametrize("how", RESETS)
def test_a_users_reset_works(how: str, device: torch.device) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 8, device)
    for _ in range(6):
        for each in (module, twin):
            RESETS[how](each, device)
        follow(model, module, twin, [2] * 3, device)
    assert model.graph_stats.replays >= 12


def test_a_state_of_another_batch_size_fails_as_eager_does_and_a_reset_goes_on(device: torch.device) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    follow(model, module, twin, [2] * 6, device)
    for each in (model, twin):
        with pytest.raises(RuntimeError, match="must match"):
            each(torch.randn(4, WIDTH, device=device))
    compare_left(model, module, twin)
    for each in (module, twin):
        each.hidden = None
    follow(model, module, twin, [4] * 6, device)


def test_a_tensor_that_a_call_left_stays_as_it_is_when_others_follow(device: torch.device) -> None:
    module, twin = pair(Written, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(10):
        compare(model, module, twin, torch.randn(2, WIDTH, device=device))
        kept.append((module.hidden, twin.hidden.clone()))
    for own, expected in kept:
        torch.testing.assert_close(own, expected)
    assert len({own.data_ptr() for own, _ in kept}) == len(kept)


@pytest.mark.parametrize("kind", ["Written", "Returned", "TheInput"])
def test_what_a_call_left_may_be_the_next_input(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    x = torch.randn(2, WIDTH, device=device)
    for call in range(14):
        compare(model, module, twin, x)
        x = module.hidden if call % 3 else torch.randn(2, WIDTH, device=device)
    assert model.graph_stats.replays >= 6


def test_an_attribute_that_is_asked_for_its_shape_alone_counts_as_read(device: torch.device) -> None:
    module, twin = pair(Shapes, device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    follow(model, module, twin, [2] * 6 + [4] * 6 + [2, 2, 4, 4, 2, 2] * 3, device)


@pytest.mark.parametrize("kind", ["Written", "Recurrent"])
def test_graphs_captured_up_front_leave_what_eager_leaves(kind: str, device: torch.device) -> None:
    module, twin = pair(KINDS[kind], device)
    model: Any = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    assert model.capture_graphs(torch.randn(4, WIDTH, device=device)).captured == 2
    for each in (module, twin):
        each.hidden = None
    follow(model, module, twin, [2] * 8, device)
    assert model.graph_stats.replays >= 2


def test_two_instances_of_a_class_and_a_copy_have_states_of_their_own(device: torch.device) -> None:
    first, first_twin = pair(Recurrent, device)
    second, second_twin = pair(Recurrent, device)
    models: list[Any] = [sg.wrap(each, capture_sizes=[2], progress=False) for each in (first, second)]
    for _ in range(8):
        compare(models[0], first, first_twin, torch.randn(2, WIDTH, device=device))
        compare(models[1], second, second_twin, torch.randn(2, WIDTH, device=device))
    copied: Any = copy.deepcopy(models[0])
    copied_twin = copy.deepcopy(first_twin)
    for _ in range(8):
        compare(copied, copied, copied_twin, torch.randn(2, WIDTH, device=device))
        compare(models[0], first, first_twin, torch.randn(2, WIDTH, device=device))
    for model in (*models, copied):
        assert model.graph_stats.replays >= 3


def test_weights_that_move_between_replays_are_followed(device: torch.device) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 6, device)
    for each in (module, twin):
        torch.manual_seed(7)
        each.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    follow(model, module, twin, [2] * 8, device)
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.replays >= 8


def test_a_submodule_that_is_replaced_has_its_own_state(device: torch.device) -> None:
    module, twin = pair(Nested, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 6, device)
    torch.manual_seed(3)
    cell = Cell().to(device).eval()
    module.cells[1], twin.cells[1] = cell, copy.deepcopy(cell)
    replays = model.graph_stats.replays
    follow(model, module, twin, [2] * 10, device)
    assert model.graph_stats.replays >= replays + 4


def test_a_forward_that_raises_midway_leaves_what_eager_leaves(device: torch.device) -> None:
    class Raises(Base):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.linear(x) if self.hidden is None else self.linear(x) + self.hidden
            if self.fails:
                raise ValueError("midway")
            return self.hidden * 2

    module, twin = pair(Raises, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 6, device)
    module.fails = twin.fails = True
    x = torch.randn(2, WIDTH, device=device)
    for each in (model, twin):
        with pytest.raises(ValueError, match="midway"):
            each(x)
    compare_left(model, module, twin)
    module.fails = twin.fails = False
    follow(model, module, twin, [2] * 4, device)


def test_calls_around_graphs_leave_their_tensors_too(device: torch.device) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        follow(model, module, twin, [2] * 4, device)
        with sg.eager():
            follow(model, module, twin, [2] * 2, device)
        follow(module, module, twin, [], device)
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(module(x), twin(x))  # the plain module shares the attribute
        compare_left(model, module, twin)
    assert model.graph_stats.replays >= 6


def test_a_method_and_a_function_leave_what_they_leave_in_their_module(device: torch.device) -> None:
    class Actor(Base):
        def act(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.hidden = torch.tanh(y if self.hidden is None else y + self.hidden)
            return self.hidden * 2

    module, twin = pair(Actor, device)
    act: Any = sg.wrap(module.act, capture_sizes=[2], progress=False)
    for _ in range(10):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(act(x), twin.act(x))
        compare_left(act, module, twin)
    assert act.graph_stats.replays >= 5

    other, other_twin = pair(Written, device)
    run: Any = sg.wrap(lambda x: other(x) + 1, capture_sizes=[2], progress=False)
    for _ in range(10):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(run(x), other_twin(x) + 1)
        compare_left(run, other, other_twin)
    assert run.graph_stats.replays >= 5


def test_two_threads_that_take_turns_find_each_others_state(device: torch.device) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    turns, failures = threading.Lock(), []

    def run() -> None:
        try:
            for _ in range(12):
                with turns, torch.no_grad():
                    compare(model, module, twin, torch.randn(2, WIDTH, device=device))
                    if device.type == "cuda":
                        torch.cuda.synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert model.graph_stats.replays >= 12


def test_a_number_that_another_thread_sets_during_a_replay_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scaled(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.linear(x) * self.scale
            return self.hidden + 1

    module, twin = pair(Scaled, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 8, device)
    runner = model._graph_runner
    replays, clone = model.graph_stats.replays, runner.clone_from_pool
    assert replays

    def clone_and_set(value: Any) -> Any:
        module.scale = 3.0
        return clone(value)

    monkeypatch.setattr(runner, "clone_from_pool", clone_and_set)
    follow(model, module, twin, [2], device)
    assert model.graph_stats.replays == replays + 1
    monkeypatch.undo()
    twin.scale = 3.0
    follow(model, module, twin, [2] * 8, device)


@pytest.mark.skipif(dict_version is None, reason="torch tells no versions of dicts")
def test_a_steady_replay_reads_no_plain_value_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 8, device)
    reads: list[str] = []
    read = ValueHolder.read
    monkeypatch.setattr(ValueHolder, "read", lambda self, opened: (reads.append(self.name), read(self, opened))[1])
    replays = model.graph_stats.replays
    follow(model, module, twin, [2] * 3, device)
    assert model.graph_stats.replays == replays + 3
    assert not reads


def test_a_cache_that_is_filled_once_is_no_such_place(device: torch.device) -> None:
    class Cached(Base):
        def forward(self, x: Tensor) -> Tensor:
            if self.hidden is None:
                self.hidden = torch.arange(WIDTH, device=x.device, dtype=x.dtype)
            return self.linear(x) + self.hidden

    module, twin = pair(Cached, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 5, device)
    assert model.graph_stats.replays >= 3
    assert not model._graph_runner.carried.places
    for each in (module, twin):
        each.hidden = each.hidden + 1  # by hand: the graph may not go on with the old one
    follow(model, module, twin, [2] * 5, device)


# Weights that hooks of torch compute before each use.


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_weight_that_a_hook_of_torch_sets_is_in_the_graph(name: str, device: torch.device) -> None:
    def vocoder() -> nn.Module:
        norm = getattr(nn.utils, name)
        return nn.Sequential(norm(nn.Conv1d(2, 3, 3)), nn.LeakyReLU(), norm(nn.ConvTranspose1d(3, 2, 3)))

    module, twin = pair(vocoder, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for call in range(14):
        x = torch.randn(2, 2, 8, device=device)
        torch.testing.assert_close(model(x), twin(x))
        manager = model.graph_manager
        assert not manager.device.in_pool(manager.pool, module[0].weight)
        if call == 7:  # the graph computes the weight anew at each replay
            for each in (module, twin):
                for parameter in each.parameters():
                    parameter.mul_(1.5)
    assert model.graph_stats.replays >= 9
    assert model.graph_stats.recaptures == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_users_hook_in_place_of_torchs_is_followed(device: torch.device) -> None:
    module, twin = pair(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.ReLU()), device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)

    def run(times: int) -> None:
        for _ in range(times):
            x = torch.randn(2, WIDTH, device=device)
            torch.testing.assert_close(model(x), twin(x))

    run(6)
    for each in (module, twin):
        each[0]._forward_pre_hooks.clear()
        each[0].register_forward_pre_hook(lambda m, _: setattr(m, "weight", m.weight_v * 0.5 + m.weight * 0.5))
    run(10)
    assert model.graph_stats.replays >= 8
    for each in (module, twin):
        each[0]._forward_pre_hooks.clear()
        weight = each[0].weight
        del each[0].weight
        each[0].weight = nn.Parameter(weight.detach().clone())
    run(8)


# What is refused.


def test_calls_with_eager_breaks_name_the_place(device: torch.device) -> None:
    class Breaks(Base):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.linear(x)
            return shown(self.hidden) * 2

    @sg.eager_break
    def shown(x: Tensor) -> Tensor:
        return x + 1

    module, twin = pair(Breaks, device)
    model: Any = sg.wrap(module, capture_sizes=[2], mode="PIECEWISE", progress=False)
    follow(model, module, twin, [2] * 5, device)
    assert "`hidden` would keep a tensor" in "".join(model.graph_stats.failures.values())
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 2


def test_something_else_in_the_place_runs_eagerly(device: torch.device) -> None:
    class Turns(Base):
        turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.hidden = self.linear(x)
            if self.turn:
                self.hidden = [self.hidden]
            return x * 2

        def left(self) -> list[Any]:
            return [self.hidden[0] if type(self.hidden) is list else self.hidden]

    module, twin = pair(Turns, device)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    follow(model, module, twin, [2] * 6, device)
    module.turn = twin.turn = 1
    follow(model, module, twin, [2] * 6, device)
    assert type(module.hidden) is list


def test_a_state_as_wide_as_the_batch_is_declared(device: torch.device) -> None:
    module, twin = pair(Recurrent, device)
    model: Any = sg.wrap(module, capture_sizes=[WIDTH], progress=False)
    follow(model, module, twin, [WIDTH] * 6, device)
    assert model.graph_stats.replays == 0
    assert "self.hidden" in str(model.graph_report())
    for each in (module, twin):
        each.hidden = None
    model.configure_graphs(batch_dims={"self.hidden": 0, "x": 0})
    follow(model, module, twin, [WIDTH] * 8, device)
    assert model.graph_stats.replays >= 3
