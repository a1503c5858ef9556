"""What people change between two calls, as robots, streaming speech, detectors and training loops do every day."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

WIDTH = 4


class Habit(nn.Module):
    """Scales its layer's output by what `read` finds."""

    def __init__(self, read: Callable[[Any, Tensor], Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.read = read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.read(self, self.layer(x))
        return found


class Processor:
    """Of an attention, as diffusers' are: its scales are plain attributes."""

    def __init__(self) -> None:
        self.scale = [1.0]


class Part(nn.Module):
    """A head, a sampler or an adapter below the module."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


def set_scale(model: Any, value: float) -> None:
    model.part.processor.scale[0] = value


# What a forward reads, what it holds, and the changes that users make to it.
HABITS: dict[str, tuple[Callable[..., Habit], list[Callable[[Any], object]]]] = {
    "a policy's number of steps": (
        lambda: Habit(lambda m, y: sum(y * step for step in range(1, m.num_steps + 1)), num_steps=4),
        [lambda m: setattr(m, "num_steps", 8), lambda m: setattr(m, "num_steps", 4)],
    ),
    "a scale": (lambda: Habit(lambda m, y: y * m.scale, scale=1.0), [lambda m: setattr(m, "scale", 0.5)]),
    "context sizes of streaming speech": (
        lambda: Habit(lambda m, y: y[:, : m.att_context_size[1]].sum(1), att_context_size=[3, 2]),
        [lambda m: setattr(m, "att_context_size", [3, 1]), lambda m: m.att_context_size.__setitem__(1, 3)],
    ),
    "statistics of observations": (
        lambda: Habit(
            lambda m, y: y - torch.as_tensor(m.part.mean[:WIDTH], dtype=y.dtype, device=y.device),
            part=Part(mean=np.zeros(17)),
        ),
        [lambda m: np.add(m.part.mean, 1.0, out=m.part.mean), lambda m: m.part.mean.__setitem__(2, 7.0)],
    ),
    "a count of observations": (
        lambda: Habit(lambda m, y: y / float(m.part.counts[9]), part=Part(counts=np.ones(512))),
        [lambda m: m.part.counts.__setitem__(9, 2.0)],
    ),
    "use_l1 of a detector's head": (
        lambda: Habit(lambda m, y: y.abs() if m.part.use_l1 else y, part=Part(use_l1=False)),
        [lambda m: setattr(m.part, "use_l1", True)],
    ),
    "an annealed weight of a loss": (
        lambda: Habit(lambda m, y: y.square() * m.kl_weight, kl_weight=0.0),
        [lambda m: setattr(m, "kl_weight", 0.25), lambda m: setattr(m, "kl_weight", 0.5)],
    ),
    "a drop path's probability": (
        lambda: Habit(lambda m, y: y * (1 - m.part.drop_prob), part=Part(drop_prob=0.0)),
        [lambda m: setattr(m.part, "drop_prob", 0.5)],
    ),
    "LoRA's scaling": (
        lambda: Habit(lambda m, y: y * m.part.scaling["default"], part=Part(scaling={"default": 1.0})),
        [lambda m: m.part.scaling.update(default=2.0), lambda m: m.part.scaling.update(default=1.0)],
    ),
    "a guidance scale": (
        lambda: Habit(lambda m, y: y * m.config["guidance"], config={"guidance": 7.5}),
        [lambda m: m.config.__setitem__("guidance", 3.0)],
    ),
    "an IP-adapter's scale": (
        lambda: Habit(lambda m, y: y * m.part.processor.scale[0], part=Part(processor=Processor())),
        [lambda m: set_scale(m, 0.5), lambda m: setattr(m.part.processor, "scale", [0.25])],
    ),
    "another attribute of an attention processor": (
        lambda: Habit(lambda m, y: y * getattr(m.part.processor, "heads", 1), part=Part(processor=Processor())),
        [lambda m: setattr(m.part.processor, "heads", 3), lambda m: setattr(m.part, "processor", Processor())],
    ),
    "FreeU's factors": (
        lambda: Habit(lambda m, y: y * getattr(m.part, "b1", None) if getattr(m.part, "b1", None) else y, part=Part()),
        [lambda m: setattr(m.part, "b1", 1.5), lambda m: delattr(m.part, "b1")],
    ),
    "an average's decay": (
        lambda: Habit(lambda m, y: y * m.ema["decay"], ema={"decay": 0.9}),
        [lambda m: m.ema.update(decay=0.99)],
    ),
    "temperature and top-p of a sampler": (
        lambda: Habit(lambda m, y: y / m.part.temperature * m.part.top_p, part=Part(temperature=1.0, top_p=0.9)),
        [lambda m: setattr(m.part, "temperature", 0.5), lambda m: setattr(m.part, "top_p", 0.5)],
    ),
    "a merged flag": (
        lambda: Habit(lambda m, y: y if m.part.merged else y * 2, part=Part(merged=False)),
        [lambda m: setattr(m.part, "merged", True), lambda m: setattr(m.part, "merged", False)],
    ),
    "a curriculum's length": (
        lambda: Habit(lambda m, y: y[:, : m.length].sum(1), length=2),
        [lambda m: setattr(m, "length", 3), lambda m: setattr(m, "length", 4)],
    ),
    "weights of losses in a dict": (
        lambda: Habit(lambda m, y: sum(y * w for w in m.weights.values()), weights={"box": 1.0, "cls": 0.5}),
        [lambda m: m.weights.update(cls=2.0), lambda m: m.weights.update(dfl=1.5), lambda m: m.weights.pop("box")],
    ),
    "a helper that is defined again": (
        lambda: Habit(lambda m, y: helper(y)),
        [lambda m: globals().__setitem__("helper", lambda y: y * 3), lambda m: globals().__setitem__("helper", double)],
    ),
    "a computed name": (
        lambda: Habit(lambda m, y: y * getattr(m, "".join(("sc", "ale"))), scale=1.0),
        [lambda m: setattr(m, "scale", 2.0)],
    ),
}


def double(y: Tensor) -> Tensor:
    return y * 2


helper = double


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def serve(model: Any, module: nn.Module, device: torch.device, times: int = 5) -> int:
    """Compare calls with the module's own, and return how many were replays."""
    before = model.graph_stats.replays
    for _ in range(times):
        x = torch.randn(3, WIDTH, device=device)
        torch.testing.assert_close(model(x), module(x))
    return int(model.graph_stats.replays - before)


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_right_and_graphs_serve_while_values_stay(habit: str, device: torch.device) -> None:
    make, changes = HABITS[habit]
    module = make().to(device).eval()
    model = sg.wrap(module, capture_sizes=[3], progress=False)
    assert serve(model, module, device)
    for change in changes:
        change(module)
        assert serve(model, module, device), model.graph_report()


class Slotted:
    __slots__ = ("table",)


class Adds:
    def __init__(self) -> None:
        self.table = torch.ones(WIDTH)

    def add(self, y: Tensor) -> Tensor:
        return y + self.table


TABLE = torch.ones(WIDTH)
TABLES = {"table": torch.ones(WIDTH)}


def tensors() -> tuple[Habit, dict[str, Callable[[Tensor], object]]]:
    """A module that reads tensors in places that are none of its parameters, and how each is replaced."""
    table = torch.ones(WIDTH)
    slotted = Slotted()
    slotted.table = torch.ones(WIDTH)
    scaled = functools.partial(lambda y, table: y * table, table=torch.ones(WIDTH))

    def read(m: Any, y: Tensor) -> Tensor:
        for one in m.tables:
            y = y + one
        y = m.scaled(m.add(y)) * TABLE + TABLES["table"] + type(m).table
        return y * m.slotted.table + table

    def replace_variable(tensor: Tensor) -> None:
        nonlocal table
        table = tensor

    class Tables(Habit):
        table = torch.ones(WIDTH)

    module = Tables(read, tables={torch.ones(WIDTH)}, slotted=slotted, scaled=scaled, add=Adds().add)
    return module, {
        "a global": lambda tensor: globals().__setitem__("TABLE", tensor),
        "a global dict": lambda tensor: TABLES.update(table=tensor),
        "a variable of a closure": replace_variable,
        "a class attribute": lambda tensor: setattr(Tables, "table", tensor),
        "what a method is bound to": lambda tensor: setattr(module.add.__self__, "table", tensor),
        "slots": lambda tensor: setattr(slotted, "table", tensor),
        "a set": lambda tensor: (module.tables.clear(), module.tables.add(tensor)),
        "keywords of a partial": lambda tensor: scaled.keywords.update(table=tensor),
    }


@pytest.mark.parametrize("place", tensors()[1])
def test_a_tensor_that_is_replaced_is_noticed_wherever_it_is_held(place: str, device: torch.device) -> None:
    module, places = tensors()
    model = sg.wrap(module.eval(), capture_sizes=[3], progress=False)
    cpu = torch.device("cpu")  # where the tensors lie
    assert serve(model, module, cpu)
    for value in (3.0, 5.0):
        places[place](torch.full((WIDTH,), value))
        assert serve(model, module, cpu)


def test_a_flag_that_a_run_takes_back_is_noticed_each_time(device: torch.device) -> None:
    """As of a recurrent policy, whose user asks for a fresh start of each episode."""

    def read(m: Any, y: Tensor) -> Tensor:
        if m.fresh:
            m.fresh = False
            return y * 0
        return y

    module = Habit(read, fresh=False).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    x = torch.randn(3, WIDTH, device=device)
    expected = module(x)
    for episode in range(6):
        module.fresh = True
        assert model(x).count_nonzero() == 0, episode
        for _ in range(5):
            torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays >= 6


def test_a_value_that_is_new_in_every_call_runs_eagerly_and_is_named(device: torch.device) -> None:
    module = Habit(lambda m, y: y * m.scale, scale=0.0).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    for step in range(12):
        module.scale = float(step)
        serve(model, module, device, 1)
    assert model.graph_stats.replays == 0
    said = str(model.graph_report())
    assert (
        "scale took 4 new values within 32 calls (8.0, 9.0, 10.0, 11.0): pass it as a tensor, keep it in a buffer"
        in said
    )
    assert model.graph_stats.batch_sizes == {3: 12}  # a graph could serve each of them


@pytest.mark.parametrize("count", [4, 6, 8])
def test_values_that_take_turns_have_a_graph_each(device: torch.device, count: int) -> None:
    """As of a sampler's temperatures: none of them is new for long."""
    module = Habit(lambda m, y: y * m.scale, scale=0.0).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    for call in range(150):
        module.scale = float(call % count)
        serve(model, module, device, 1)
    assert model.graph_stats.captures == count
    assert model.graph_stats.replays >= 75


def test_many_values_that_take_turns_run_eagerly_at_first(device: torch.device) -> None:
    """Each needs a graph, and there is room for some."""
    module = Habit(lambda m, y: y * m.scale, scale=0.0).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    for call in range(100):
        module.scale = float(call % 12)
        serve(model, module, device, 1)
    assert model.graph_stats.captures == 0


NESTED: dict[str, Callable[[Any], Any]] = {
    "dict": lambda value: {"v": value},
    "namespace": lambda value: types.SimpleNamespace(v=value),
    "record": lambda value: Section(value),
}


@dataclasses.dataclass
class Section:
    v: Any


@pytest.mark.parametrize("kind", ["dict", "namespace", "record"])
def test_a_number_deep_in_a_configuration_is_noticed(device: torch.device, kind: str) -> None:
    depth = 12
    innermost = config = NESTED[kind](1.0)
    for _ in range(depth):
        config = NESTED[kind](config)

    def read(m: Any, y: Tensor) -> Tensor:
        value = m.config
        for _ in range(depth + 1):
            value = value["v"] if kind == "dict" else value.v
        return y * value

    module = Habit(read, config=config).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    assert serve(model, module, device)
    if kind == "dict":
        innermost["v"] = 3.0
    else:
        innermost.v = 3.0
    assert serve(model, module, device)


def test_a_call_that_its_python_state_refuses_may_have_no_batch(device: torch.device) -> None:
    module = Habit(lambda m, y: y * m.scale, scale=0.0).to(device).eval()
    module.layer = nn.Identity()  # which takes any shape
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    for step in range(12):
        module.scale = float(step)
        serve(model, module, device, 1)
    assert model(torch.tensor(2.0, device=device)).item() == 22
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    assert model(ragged).to_padded_tensor(0.0).sum() == 55
    assert model.graph_stats.batch_sizes == {3: 12}


def test_the_remedies_for_such_a_value_work(device: torch.device) -> None:
    module = Habit(lambda m, y: y * m.scale, scale=0.0).to(device).eval()
    del module.scale
    module.register_buffer("scale", torch.zeros((), device=device))
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    for step in range(12):
        module.scale.fill_(step)
        serve(model, module, device, 1)
    assert model.graph_stats.replays > 6


def test_a_trainers_count_that_no_code_names_is_let_go(device: torch.device) -> None:
    module = Habit(lambda m, y: y * 2, progress_of_training=0).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    served = 0
    for step in range(24):
        module.progress_of_training = step
        served += serve(model, module, device, 1)
    assert served > 12


def test_a_log_that_a_forward_fills_runs_eagerly_and_is_named(device: torch.device) -> None:
    log: list[int] = []

    def read(m: Any, y: Tensor) -> Tensor:
        log.append(len(y))
        return y * 2

    module = Habit(read).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    before = len(log)
    assert not serve(model, module, device)
    assert len(log) == before + 10  # the module's own calls, too
    assert "the variable log in the closure" in str(model.graph_report())


def test_two_values_in_turn_have_two_graphs(device: torch.device) -> None:
    """However often they change, there are no more captures."""
    module = Habit(lambda m, y: y * m.scale, scale=1.0).to(device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    for _ in range(4):
        for scale in (1.0, 2.0):
            module.scale = scale
            serve(model, module, device, 4)
    assert model.graph_stats.captures == 2


class Modal(nn.Module):
    """Lets `keep` remember what a call is given for the calls after it, and multiplies by what `read` finds."""

    def __init__(self, keep: Callable[[Any, Any], object], read: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.keep, self.read = keep, read
        vars(self).update(attributes)

    def set_mode(self, mode: int) -> None:
        self.mode = mode

    def reset(self, given: int) -> None:
        self.cache = self.layer.weight.new_full((WIDTH,), float(given)) if given > 1 else None

    def forward(self, x: Tensor, given: int | None = None) -> Tensor:
        if given is not None:
            self.keep(self, given)
        found: Tensor = self.layer(x) * self.read(self)
        return found


FACTORS: dict[int, Callable[[], float]] = {1: lambda: 1.0, 2: lambda: 2.0, 3: lambda: 3.0}


class Given:
    mode = 1


# How a call's argument is kept, how later calls read it, and what the module holds at first.
KEPT: dict[str, tuple[Callable[[Any, int], object], Callable[[Any], Any], dict[str, Any]]] = {
    "an attribute": (lambda m, given: setattr(m, "mode", given), lambda m: m.mode, {"mode": 1}),
    "an attribute that was None": (
        lambda m, given: setattr(m, "mode", given),
        lambda m: 1 if m.mode is None else m.mode,
        {"mode": None},
    ),
    "an attribute that appears": (lambda m, given: setattr(m, "mode", given), lambda m: getattr(m, "mode", 1), {}),
    "a setter": (lambda m, given: m.set_mode(given), lambda m: m.mode, {"mode": 1}),
    "a start": (lambda m, given: setattr(m, "index", 0), lambda m: m.index + 1, {"index": 5}),
    "an item of a dict": (lambda m, given: m.state.update(mode=given), lambda m: m.state.get("mode", 1), {"state": {}}),
    "an item of a list": (lambda m, given: m.state.__setitem__(0, given), lambda m: m.state[0], {"state": [1]}),
    "another list": (lambda m, given: setattr(m, "state", [given]), lambda m: m.state[0], {"state": [1]}),
    "an item of a set": (
        lambda m, given: (m.state.clear(), m.state.add(given)),
        lambda m: sum(m.state),
        {"state": {1}},
    ),
    "an object's attribute": (
        lambda m, given: setattr(m.part, "mode", given),
        lambda m: m.part.mode,
        {"part": Part(mode=1)},
    ),
    "another object": (
        lambda m, given: setattr(m, "part", Part(mode=given)),
        lambda m: m.part.mode,
        {"part": Given()},
    ),
    "a function": (lambda m, given: setattr(m, "factor", FACTORS[given]), lambda m: m.factor(), {"factor": FACTORS[1]}),
    "a cache that is dropped": (
        lambda m, given: m.reset(given),
        lambda m: 1.0 if m.cache is None else m.cache,
        {"cache": None},
    ),
    "a count of such calls": (
        lambda m, given: setattr(m, "count", m.count + 1),
        lambda m: m.count,
        {"count": 0},
    ),
}


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_call_keeps_of_an_argument_counts_in_the_calls_after_it(
    kept: str, turn: int, device: torch.device
) -> None:
    """Calls come in any order, and in phases, the first with or without the argument."""
    keep, read, attributes = KEPT[kept]
    module = Modal(keep, read, **copy.deepcopy(attributes)).to(device).eval()
    model: Any = sg.wrap(copy.deepcopy(module), capture_sizes=[3], progress=False)
    rng = random.Random(turn)
    calls = [rng.choice([None, None, 1, 2, 3]) for _ in range(60)]
    phases = [given for given in (None, 2, None, 3, None, 1, None) for _ in range(6)]
    if turn == 2:
        phases = [given for given in (2, None, 1, None) for _ in range(4)] + phases
    for given in itertools.chain(phases, calls):
        x = torch.randn(3, WIDTH, device=device)
        torch.testing.assert_close(model(x, given), module(x, given))
        assert vars(sg.unwrap(model)).get("mode") == vars(module).get("mode")
    assert model.graph_stats.replays > (2 if kept == "a count of such calls" else 10), model.graph_report()


@pytest.mark.parametrize("called", [False, True], ids=["first", "after calls"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_captures_up_front_keep_what_their_run_kept(mode: str, called: bool, device: torch.device) -> None:
    keep, read, attributes = KEPT["an attribute"]
    module = Modal(keep, read, **attributes).to(device).eval()
    model: Any = sg.wrap(copy.deepcopy(module), capture_sizes=[2, 4], mode=mode, progress=False)
    x = torch.randn(4, WIDTH, device=device)
    for _ in range(4 * called):
        torch.testing.assert_close(model(x), module(x))
    model.capture_graphs(x, 2)
    module(x, 2)
    for given in (2, 2, None, None, None, 1, None, 2, 2, None, 2):
        replays = model.graph_stats.replays
        for rows in (4, 3, 2):
            x = torch.randn(rows, WIDTH, device=device)
            torch.testing.assert_close(model(x, given), module(x, given))
            assert sg.unwrap(model).mode == module.mode
        if given == 2 and module.mode == 2:
            assert model.graph_stats.replays > replays
        module.mode = sg.unwrap(model).mode = 1 if given == 2 else module.mode


def test_a_count_of_all_calls_is_no_part_of_the_key_whoever_counts(device: torch.device) -> None:
    """At any size, and by two kinds of calls: a part of the key would make each call the first of its kind."""
    module = Modal(lambda m, given: None, lambda m: setattr(m, "count", m.count + 1) or 2.0, count=0)
    model: Any = sg.wrap(module.to(device).eval(), capture_sizes=[2, 4], progress=False)
    for step in range(40):
        x = torch.randn(step % 4 + 1, WIDTH, device=device)
        torch.testing.assert_close(model(x, *[1][: step % 2]), module.layer(x) * 2)
        assert module.count == step + 1
    assert model.graph_stats.eager["first_call"] == 2
    assert "the forward changes `count` whenever it runs" in str(model.graph_report())
    assert "new values" not in str(model.graph_report())


def test_a_count_of_training_calls_makes_no_others_run_eagerly(device: torch.device) -> None:
    module = Habit(lambda m, y: y * 2 if not m.training or setattr(m, "count", m.count + 1) is None else y, count=0)
    model: Any = sg.wrap(module.to(device).eval(), capture_sizes=[3], progress=False)
    for _ in range(3):
        assert serve(model, module, device)
        model.train()
        for _ in range(6):
            model(torch.randn(3, WIDTH, device=device))
        model.eval()
    assert module.count == 18


def test_what_a_call_of_a_function_keeps_counts_in_the_calls_after_it(device: torch.device) -> None:
    layer, kept = nn.Linear(WIDTH, WIDTH).to(device), {"mode": 1}

    def scale(x: Tensor, given: int | None = None) -> Tensor:
        if given is not None:
            kept["mode"] = given
        return layer(x) * kept["mode"]

    model: Any = sg.wrap(scale, capture_sizes=[3], progress=False)
    mode = 1
    for given in (given for given in (None, 2, None, 3, None, 1, None, 2) for _ in range(6)):
        mode = given or mode
        x = torch.randn(3, WIDTH, device=device)
        torch.testing.assert_close(model(x, given), layer(x) * mode)
        assert kept["mode"] == mode
    assert model.graph_stats.replays > 10
