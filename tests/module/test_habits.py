"""What people change between two calls, as robots, streaming speech, detectors and training loops do every day."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

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
        "scale takes new values all the time (8.0, 9.0, 10.0, 11.0): pass it as a tensor, or keep it in a buffer"
        in said
    )


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
