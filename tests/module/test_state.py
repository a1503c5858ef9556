"""Tensors that a graph reads stay alive, and only changes of them cause a recapture."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.stateful import MOVED, WIDTH, Model, assign_state, captured, new, parameter, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def test_a_tensor_of_a_weak_reference_stays_alive_after_its_user_let_it_go(device):
    table = torch.full((WIDTH,), 3.0, device=device)

    class Adds(nn.Module):
        def forward(self, x):
            return x + reference()  # which nothing watches

    reference = weakref.ref(table)
    model = sg.wrap(Adds().eval(), capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    del table
    gc.collect()
    junk = [torch.full((WIDTH,), -1.0, device=device) for _ in range(100)]
    x = rows(4, device)
    close(model(x), x + 3)
    del junk


GLOBAL = weakref.WeakValueDictionary()  # which nothing watches


def test_a_global_tensor_freed_after_the_capture_stays_alive(device):
    class Reads(nn.Module):
        def forward(self, x):
            return x * GLOBAL["scale"] + GLOBAL["bias"].sum()

    held = {"scale": torch.full((WIDTH,), 2.0, device=device), "bias": torch.ones(3, device=device)}
    GLOBAL.update(held)
    model = sg.wrap(Reads().eval(), capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    held.clear()
    gc.collect()
    junk = [torch.full((WIDTH,), -1.0, device=device) for _ in range(100)]
    x = rows(4, device)
    close(model(x), x * 2 + 3)
    del junk


def test_a_tensor_that_is_gone_from_a_closure_is_missed_as_in_eager(device):
    holder = {"table": torch.full((WIDTH,), 3.0, device=device)}

    class Adds(nn.Module):
        def forward(self, x):
            return x + holder["table"]

    model = sg.wrap(Adds().eval(), capture_sizes=[4])
    for _ in range(4):
        model(rows(4, device))
    assert model.graph_stats.replays
    table = holder.pop("table")
    with pytest.raises(KeyError, match="table"):
        model(rows(4, device))
    holder["table"] = table
    x = rows(4, device)
    close(model(x), x + 3)


def test_a_tensor_from_a_closure_that_gets_other_memory_is_noticed(device):
    table = torch.ones(WIDTH, device=device)

    class Adds(nn.Module):
        def forward(self, x):
            return x + table

    module = Adds().eval()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    table.data = torch.full((WIDTH,), 9.0, device=device)
    x = rows(4, device)
    close(model(x), x + 9)
    table.add_(1)
    close(model(x), x + 10)


def test_changes_of_other_modules_cost_no_recapture(device):
    model, module = captured(device)
    other = Model(device).eval()
    neighbour = sg.wrap(other, capture_sizes=[4])
    for change in MOVED.values():
        neighbour(rows(4, device))
        change(Model(device).eval())
        x = rows(4, device)
        close(model(x), module(x))
    assign_state(other)
    close(model(x), module(x))
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.captures == 2


def test_a_change_that_is_undone_costs_no_recapture(device):
    model, module = captured(device)
    weight, table = module.linear.weight, module.table
    module.linear.weight, module.table = parameter(weight), new(table)
    module.linear.weight, module.table = weight, table
    x = rows(4, device)
    close(model(x), module(x))
    assert model.graph_stats.recaptures == 0


def test_an_attribute_the_forward_never_reads_may_change_freely(device):
    model, module = captured(device)
    module.last_seen = torch.zeros(3, device=device)
    for _ in range(3):
        module.last_seen = torch.ones(3, device=device)
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 0


def test_old_weights_are_freed_when_they_are_replaced(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    old = weakref.ref(module.weight)
    module.weight = parameter(module.weight)
    x = rows(4, device)
    close(model(x), module(x))
    gc.collect()
    assert old() is None


def test_a_merge_of_a_low_rank_adapter_is_seen(device):
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH, bias=False)
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            self.merged = False

        def forward(self, x):
            return self.base(x) if self.merged else self.base(x) + self.up(self.down(x))

        def merge(self):
            self.base.weight.data = self.base.weight.data + self.up.weight @ self.down.weight
            self.merged = True

    module = Adapted().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        expected = model(x)
    model.merge()
    for _ in range(4):
        close(model(x), expected)
    assert model.graph_stats.recaptures == 1


def test_pruning_after_the_capture_is_seen(device):
    from torch.nn.utils import prune

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        model(x)
    prune.l1_unstructured(module[0], "weight", amount=0.5)
    for _ in range(3):
        close(model(x), module(x))
    prune.remove(module[0], "weight")
    for _ in range(4):
        close(model(x), module(x))


def test_a_parametrization_after_the_capture_is_seen(device):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    module = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        model(x)
    nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    for _ in range(4):
        close(model(x), module(x))


def test_an_optimizer_step_is_seen(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    x = rows(4, device)
    for _ in range(4):
        with torch.enable_grad():
            model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(3):
            close(model(x), module(x))
    assert model.graph_stats.captures == 1
    assert reasons(model)["grad"] == 4


def test_an_attribute_that_garbage_collection_shrinks_while_it_is_read_is_no_error(device):
    """Values leave a weak dictionary whenever the collector runs, also in the midst of reading its items."""

    class Entry:
        def __init__(self):
            self.me = self  # only the collector frees it

    module = Model(device).eval()
    module.cache = weakref.WeakValueDictionary()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    before = gc.get_threshold()
    gc.disable()
    try:
        module.cache.update((number, Entry()) for number in range(20_000))
        gc.set_threshold(gc.get_count()[0] + 10_000)  # reached by a list of the items, and hardly by anything else
        gc.enable()
        model.capture_graphs(x := rows(4, device))
    finally:
        gc.enable()
        gc.set_threshold(*before)
    close(model(x), module(x))
    assert model.graph_stats.replays == 1


def test_a_tensor_that_the_first_run_of_captures_adds_is_the_modules(device):
    """It is free when the module lets it go, and replaced by the next call."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = {}

        def forward(self, x):
            if not self.tables:
                self.tables["scale"] = torch.full((WIDTH,), 2.0, device=x.device)
            return x * self.tables["scale"]

    model = sg.wrap(Lazy().eval(), capture_sizes=[2, 4], batch_dims={"x": 0}, progress=False)
    model.capture_graphs(rows(4, device))
    for count in (4, 2, 4, 2):
        x = rows(count, device)
        close(model(x), x * 2)
    assert model.graph_stats.replays > 0
    scale = weakref.ref(model.tables["scale"])
    model.tables["scale"] = torch.full((WIDTH,), 3.0, device=device)
    assert scale() is None
    x = rows(4, device)
    close(model(x), x * 3)
