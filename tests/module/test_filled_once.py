"""Memory that a forward fills once for each batch size, as Python notes somehow, is filled when it is read.

A recording that would note it is refused, since it fills nothing; a batch size that ran eagerly first is recorded.
"""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device
from tests.module.answers import close
from tests.module.models import WIDTH, rows

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
LARGEST = 16
SIZES = [1, 2, 4, 8, LARGEST]
NOTED: set[int] = set()


class Fills(nn.Module):
    """Adds a row of a table, which it fills at the first call of each batch size.

    Args:
        note: notes that the row is filled, and returns True if that was noted before.
        by: the dimension of its input that a row of the table is for.
    """

    def __init__(self, note: Callable[[Any, Tensor], bool], by: int = 0) -> None:
        super().__init__()
        self.linear, self.note, self.by = nn.Linear(WIDTH, WIDTH), note, by
        self.register_buffer("table", torch.zeros(LARGEST + 1, WIDTH))
        self.items: set[Any] = set()
        self.dict: dict[Any, Any] = {}
        self.ordered: collections.OrderedDict[int, bool] = collections.OrderedDict()
        self.flags, self.left = [False] * (LARGEST + 1), set(range(LARGEST + 1))
        self.holder = types.SimpleNamespace()

    def expected(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.linear.weight[0] + 3

    def forward(self, x: Tensor) -> Tensor:
        if not self.note(self, x):
            self.table[x.shape[self.by]].copy_(self.linear.weight[0] + 3)
        return self.linear(x) + self.table[x.shape[self.by]]


def in_set(items: set[Any], item: Any) -> bool:
    noted = item in items
    items.add(item)
    return noted


def in_dict(items: dict[Any, Any], key: Any, value: Any = True) -> bool:
    noted = key in items
    items[key] = value
    return noted


def taken_from(items: set[int], size: int) -> bool:
    noted = size not in items
    items.discard(size)
    return noted


def in_list(flags: list[bool], size: int) -> bool:
    noted, flags[size] = flags[size], True
    return noted


NOTES: dict[str, Callable[[Any, Tensor], bool]] = {
    "a set": lambda module, x: in_set(module.items, len(x)),
    "a set of shapes": lambda module, x: in_set(module.items, x.shape),
    "a set of what is left": lambda module, x: taken_from(module.left, len(x)),
    "a dict": lambda module, x: in_dict(module.dict, len(x)),
    "a dict of numbers": lambda module, x: in_dict(module.dict, len(x), len(x)),
    "a dict by tuples": lambda module, x: in_dict(module.dict, (len(x), x.dtype, "table")),
    "a dict by shapes and dtypes": lambda module, x: in_dict(module.dict, (x.shape, x.dtype)),
    "a dict of ones": lambda module, x: in_dict(module.dict, len(x), 1),
    "a dict by names": lambda module, x: in_dict(module.dict, f"rows {len(x)}"),
    "an ordered dict": lambda module, x: in_dict(module.ordered, len(x)),
    "a list": lambda module, x: in_list(module.flags, len(x)),
    "an attribute": lambda module, x: in_dict(vars(module), f"filled{len(x)}"),
    "an attribute of an object": lambda module, x: in_dict(vars(module.holder), f"filled{len(x)}"),
    "a global": lambda module, x: in_set(NOTED, len(x)),
}


# How the warning calls them.
PLACES = {
    "a set": "items",
    "a set of shapes": "items",
    "a set of what is left": "left",
    "a list": "flags",
    "an attribute": "filled",
    "an attribute of an object": "holder.",
    "a global": "the global NOTED of tests.module.test_filled_once",
}


@pytest.fixture(params=NOTES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def module(place: str, device: torch.device) -> Fills:
    NOTED.clear()
    return Fills(NOTES[place]).to(device).eval()


def failures(model: Any) -> list[str]:
    assert model.graph_stats.failures
    return list(model.graph_stats.failures.values())


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("verify", [0, 1])
def test_captures_up_front_note_nothing_and_name_the_place(
    module: Fills, place: str, mode: str, verify: int, device: torch.device
) -> None:
    model = sg.wrap(module, capture_sizes=SIZES, mode=mode, verify=verify, progress=False)
    model.capture_graphs(rows(LARGEST, device))
    for size in (1, 8, 8, 7, 8, 3, 4, 4, 2, 16, 15, 5, 6, 1) * 2:
        x = rows(size, device)
        close(model(x), module.expected(x))
    assert model.graph_stats.replays == 0
    expected = PLACES.get(place, "ordered" if "ordered" in place else "dict")
    for said in failures(model):
        assert f"the recording sets {expected}" in said


def test_eager_calls_between_captures_and_replays_fill_the_memory(module: Fills, device: torch.device) -> None:
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    model.capture_graphs(rows(LARGEST, device))
    for size in SIZES * 2:
        x = rows(size, device)
        with sg.eager():
            close(model(x), module.expected(x))
        close(model(x), module.expected(x))


@pytest.mark.parametrize(
    "sizes",
    [
        (7, 8, 8, 8, 7, 8, 3, 4, 4, 4, 3, 16, 16, 15, 16),
        (8, 7, 8, 7, 8, 4, 3, 3, 3, 4, 1, 1, 1, 2, 2, 2, 16, 9, 9, 9, 16),
        (5, 5, 5, 5, 8, 8, 3, 3, 3, 4, 4, 9, 9, 9, 16, 16),
    ],
    ids=["padded first", "exact first", "padded only"],
)
@pytest.mark.parametrize("verify", [0, 1])
def test_captures_at_first_calls_note_nothing(
    module: Fills, sizes: tuple[int, ...], verify: int, device: torch.device
) -> None:
    model = sg.wrap(module, capture_sizes=SIZES, verify=verify, progress=False)
    for size in sizes:
        x = rows(size, device)
        close(model(x), module.expected(x))
    with sg.eager():
        for size in range(1, LARGEST + 1):
            x = rows(size, device)
            close(model(x), module.expected(x))
    assert model.graph_stats.replays > 0


class OneRow(Fills):
    """Reads other memory for one row: all sizes between that and the largest are captured a second time."""

    def __init__(self, note: Callable[[Any, Tensor], bool]) -> None:
        super().__init__(note)
        self.one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        filled = super().forward(x)
        return filled if len(x) > 1 else filled + self.one(x)

    def expected(self, x: Tensor) -> Tensor:
        return super().expected(x) if len(x) > 1 else super().expected(x) + self.one(x)


class Caches(Fills):
    """Keeps a tensor for each batch size, too: a size whose capture leaves one is captured after a run of its own."""

    def __init__(self, note: Callable[[Any, Tensor], bool]) -> None:
        super().__init__(note)
        self.kept: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.kept:
            self.kept[len(x)] = torch.zeros(len(x), 1, device=x.device)
        return super().forward(x) + self.kept[len(x)]


@pytest.mark.parametrize(("kind", "verify"), [(OneRow, 0), (OneRow, 1), (Caches, 1)])
def test_second_captures_and_runs_of_their_own_note_nothing(
    kind: type[Fills], verify: int, device: torch.device
) -> None:
    module = kind(NOTES["a set"]).to(device).eval()
    model = sg.wrap(module, capture_sizes=SIZES, verify=verify, progress=False)
    model.capture_graphs(rows(LARGEST, device))
    for size in (*SIZES, 7, *SIZES, 3, *SIZES):
        x = rows(size, device)
        close(model(x), module.expected(x))
        with sg.eager():
            close(model(x), module.expected(x))
    assert model.graph_stats.replays == 0


@pytest.mark.parametrize("by", [0, 1], ids=["rows", "length"])
@pytest.mark.parametrize("upfront", [False, True])
def test_runs_that_learn_about_lengths_note_nothing(by: int, upfront: bool, device: torch.device) -> None:
    module = Fills(lambda module, x: in_set(module.items, x.shape[by]), by).to(device).eval()
    model = sg.wrap(module, capture_sizes=[1, 2, 4], lengths=[4, 8, 16], length_dims={"x": 1}, progress=False)
    if upfront:
        model.capture_graphs(torch.randn(4, 16, WIDTH, device=device))
    for size in (2, 2, 1, 4, 4):
        for length in (3, 3, 5, 7, 4, 8, 8, 11, 16):
            x = torch.randn(size, length, WIDTH, device=device)
            close(model(x), module.expected(x))


@pytest.mark.parametrize("estimate", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_captures_of_an_engine_note_nothing(mode: str, estimate: bool, device: torch.device) -> None:
    module = Fills(NOTES["a set"]).to(device).eval()
    buffer = torch.zeros(LARGEST, WIDTH, device=device)

    @sg.eager_break
    def broken(x: Tensor) -> Tensor:
        return x * 1.0

    def step(mode: Any, descriptor: Any) -> Tensor:
        return broken(module(buffer[: descriptor.num_tokens]))

    config = sg.CudaGraphConfig(capture_sizes=SIZES, mode=mode, progress=False)
    manager = sg.CudaGraphManager(config, device=device)
    if estimate:
        with pytest.raises(sg.CaptureError, match="the recording sets the attribute items"):
            manager.memory_estimate(step)
    assert manager.capture(step).captured == 0
    for size in SIZES * 2:
        for full in (True, False):
            buffer[:size] = x = rows(size, device)
            batch = manager.dispatch(size, allow_full=full)
            close(manager.run(batch, step), module.expected(x))
        close(step(None, batch.descriptor), module.expected(buffer[:size]))


def test_a_run_beside_captures_that_notes_something_refuses_no_graph(device: torch.device) -> None:
    """The run of a second size is undone, and shows how outputs are cut."""
    module = Fills(NOTES["a set"]).to(device).eval()
    model = sg.wrap(module, capture_sizes=[8], progress=False)
    model.capture_graphs(rows(8, device))
    for size in (8, 8, 4, 5):
        x = rows(size, device)
        close(model(x), module.expected(x))
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays == 1
    with sg.eager():
        x = rows(4, device)
        close(model(x), module.expected(x))


def test_a_check_leaves_a_module_as_it_was(device: torch.device) -> None:
    module = Fills(NOTES["a set"]).to(device).eval()
    sg.check(module, rows(8, device))
    with pytest.raises(sg.CaptureError, match="the recording sets items"):
        sg.check(module, rows(8, device), capture_sizes=[2, 4, 8])
    for size in range(1, LARGEST + 1):
        x = rows(size, device)
        close(module(x), module.expected(x))


@pytest.mark.parametrize("verify", [0, 1])
def test_places_that_are_given_out_by_size_stay(verify: int, device: torch.device) -> None:
    """The number of a place is no note: another entry, or a count beside it, goes on from there."""

    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(sum(SIZES), WIDTH))
            self.given = types.SimpleNamespace(used=0, places={}, numbers={}, names=[])

        def forward(self, x: Tensor) -> Tensor:
            given, size = self.given, len(x)
            if size not in given.places:
                given.places[size], given.numbers[size] = given.used, len(given.names)
                given.used += size
                given.names.append(f"rows {size}")
            assert given.names[given.numbers[size]] == f"rows {size}"
            return self.memory[given.places[size] : given.places[size] + size].copy_(x * 2) + 1

    model = sg.wrap(Regions().to(device).eval(), capture_sizes=SIZES, padding=False, verify=verify, progress=False)
    model.capture_graphs(rows(LARGEST, device))
    for size in SIZES * 3:
        x = rows(size, device)
        close(model(x), x * 2 + 1)
        with sg.eager():
            close(model(x), x * 2 + 1)
    assert model.graph_stats.captures == 0


@pytest.mark.parametrize("kind", [list, collections.deque])
def test_what_another_thread_was_given_meanwhile_stays(kind: Any, device: torch.device) -> None:
    """It puts nothing there at the second pass of captures, which tells it from the forward."""

    class Reports(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.waiting, self.seen, self.dict, self.slots = kind(), set(), {}, [None] * 8
            self.threads = [threading.Thread(target=self.serve, args=(size,)) for size in (2, 4)]

        def serve(self, size: int) -> None:
            self.waiting.append(size)
            self.seen |= {"requests", 5, size}
            self.dict["rows"] = self.dict[size] = size
            self.slots[5] = self.slots[size] = True

        def forward(self, x: Tensor) -> Tensor:
            if graph_device(x.device).is_capturing() and threads:
                thread = threads.pop()
                thread.start()
                thread.join()
            return x + 1

    model = sg.wrap(Reports().to(device).eval(), capture_sizes=[2, 4], progress=False)
    threads = model.threads.copy()
    model.capture_graphs(rows(4, device))
    assert list(model.waiting) == [4, 2]
    assert model.seen == {"requests", 5, 4, 2}
    assert model.dict == {"rows": 2, 2: 2, 4: 4}
    assert model.slots == [None, None, True, None, True, True, None, None]
    assert model.graph_stats.captures == 2
