"""`check` finds, by trying, the parts of a library's module that must break, and says so in one line."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from simplegraph.doctor.parts_to_break import Obstacle, find_parts

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WIDTH = 6
LIBRARY = """
import torch
from torch import nn

class Reads(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x) if x.sum().item() < 1e9 else x

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.reads, self.mlp = Reads(width), nn.Linear(width, width)

    def forward(self, x):
        return self.mlp(self.reads(x))

class Chain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = Reads(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.tail = nn.Sequential(nn.Linear(width, width), Reads(width))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.tail(x))

class Select(nn.Module):
    def forward(self, x):
        return x[x > 0]

class Count(nn.Module):
    def forward(self, x):
        return int((x > 0).sum())

class Pool(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        selected = self.inner(x)
        return x * (selected.sum() if isinstance(selected, torch.Tensor) else selected)

class Pooled(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.first, self.pool, self.last = nn.Linear(width, width), Pool(inner), nn.Linear(width, width)

    def forward(self, x):
        return self.last(self.pool(self.first(x)))

class Detector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.chain, self.select = Chain(width), Select()

    def forward(self, x):
        return x + self.select(self.chain(x)).sum() + self.select(x).shape[0]

class Cached(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.reads, self.weight, self.table = Reads(width), nn.Parameter(torch.ones(width)), None

    def forward(self, x):
        if self.table is None:
            self.table = self.weight.detach() * 2
        return self.reads(x * self.table) + 1
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package as pip installs it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "reading_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("reading_library")
    del sys.modules["reading_library"]


def check_served(target: Any, device: torch.device) -> None:
    served: Any = sg.wrap(target, capture_sizes=[4], progress=False, mode="PIECEWISE")
    for step in range(8):
        x = torch.randn(4, WIDTH, device=device) + step - 4
        torch.testing.assert_close(served(x), target(x))
    assert served.graph_stats.replays >= 4
    assert not served.graph_stats.failures


def test_a_chain_of_parts_is_printed_as_one_line_that_works(library: Any, device: torch.device) -> None:
    model = library.Chain(WIDTH).to(device).eval()
    kinds = [type(child) for child in model.modules()]
    report = sg.check(model, torch.randn(4, WIDTH, device=device))
    assert [type(child) for child in model.modules()] == kinds, "the module is left as it was"
    assert not report
    assert report.break_at == {"model": ("head", "blocks.*.reads", "tail.1")}
    line = (
        "capturable: piecewise, by "
        'simplegraph.break_at(model, "head", "blocks.*.reads", "tail.1") and mode=\'PIECEWISE\'\n'
    )
    assert str(report).startswith(line)
    sg.break_at(model, *report.break_at["model"])
    check_served(model, device)
    assert not sg.check(model, torch.randn(4, WIDTH, device=device)).break_at


@pytest.mark.parametrize("inner", ["Select", "Count"])
def test_the_first_part_around_with_one_shape_is_named(library: Any, inner: str, device: torch.device) -> None:
    """What a part returns may be of another shape, or another number, for the next batch."""
    model = library.Pooled(WIDTH, getattr(library, inner)()).to(device).eval()
    report = sg.check(model, torch.randn(4, WIDTH, device=device))
    assert report.break_at == {"model": ("pool",)}
    sg.break_at(model, *report.break_at["model"])
    check_served(model, device)


def test_a_module_whose_own_forward_is_in_the_way_is_said_to_have_no_such_parts(
    library: Any, device: torch.device
) -> None:
    model = library.Detector(WIDTH).to(device).eval()
    report = sg.check(model, torch.randn(4, WIDTH, device=device))
    assert report.break_at == {}
    assert "break_at" not in str(report)
    assert "not piecewise either" in str(report)
    assert str(report.piecewise) in str(report)


def test_parts_are_named_as_a_functions_code_has_them(library: Any, device: torch.device) -> None:
    class Service:
        net = library.Chain(WIDTH).to(device).eval()

    service = Service()

    def doubled(x: Tensor) -> Tensor:
        found: Tensor = service.net(x) * 2
        return found

    report = sg.check(doubled, torch.randn(4, WIDTH, device=device))
    assert report.break_at == {"service.net": ("head", "blocks.*.reads", "tail.1")}
    assert 'simplegraph.break_at(service.net, "head", "blocks.*.reads", "tail.1")' in str(report)
    sg.break_at(service.net, *report.break_at["service.net"])
    check_served(doubled, device)


def test_a_module_that_a_function_calls_and_that_must_break_as_a_whole_is_no_pattern(
    library: Any, device: torch.device
) -> None:
    net = library.Reads(WIDTH).to(device).eval()
    report = sg.check(lambda x: net(x) * 2, torch.randn(4, WIDTH, device=device))
    assert report.break_at == {}
    assert "call net in a function of your own, marked @simplegraph.eager_break" in str(report)
    marked = sg.eager_break(lambda x: net(x))
    check_served(lambda x: marked(x) * 2, device)


@pytest.mark.parametrize("inside", ["blocks.*.reads", "blocks.*.reads.linear"])
def test_a_part_that_fails_although_it_is_a_break_gives_way_to_the_part_around_it(library: Any, inside: str) -> None:
    """As one that a backward runs, where no break is one."""
    tried = []

    def find_obstacle() -> Obstacle | None:
        broken = [name for name, child in model.named_modules() if hasattr(type(child), "_simplegraph_unbroken")]
        tried.append(broken)
        if not broken:
            return Obstacle("blocks.*.reads", "reads")
        return None if "blocks.0" in broken else Obstacle(inside, "reads")

    model = library.Chain(WIDTH)
    assert find_parts(model, find_obstacle) == ({"model": ("blocks.*",)}, "")
    assert len(tried) == 3


def test_a_tensor_that_the_first_call_makes_is_there_for_each_trial(library: Any, device: torch.device) -> None:
    model = library.Cached(WIDTH).to(device).eval()
    report = sg.check(model, torch.randn(4, WIDTH, device=device))
    assert model.table is None, "the module is left as it was"
    assert report.break_at == {"model": ("reads",)}
