"""Memory that graphs read is kept alive while they may read it, and released once a change is noticed."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import simplegraph as sg
from tests.module.answers import close
from tests.module.stateful import MOVED, WIDTH, Model, captured, new, parameter, rows

pytestmark = pytest.mark.usefixtures("no_grad")


class Freed:
    """Tells whether memory is given back; an emulated graph keeps it, lest another tensor gets the address."""

    def __init__(self, tensor):
        self._reference = StorageWeakRef(tensor.untyped_storage())

    def expired(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return storage is None or (storage.device.type == "cpu" and torch._C._storage_Use_Count(storage._cdata) == 1)


REPLACED = {
    ".data =": lambda m: setattr(m.linear.weight, "data", new(m.linear.weight)),
    "parameter replaced": lambda m: setattr(m.linear, "weight", parameter(m.linear.weight)),
    "load_state_dict(assign=True)": MOVED["load_state_dict(assign=True)"],
    "written through _parameters": MOVED["written through _parameters"],
    "submodule replaced": MOVED["submodule replaced"],
    "swap_tensors": MOVED["swap_tensors"],
    "_parameters replaced": lambda m: setattr(
        m.linear, "_parameters", {"weight": parameter(m.linear.weight), "bias": None}
    ),
    "converted": lambda m: m.double(),
}


@pytest.mark.parametrize("change", REPLACED)
def test_a_replaced_weight_is_free_before_the_next_call(device, change):
    model, module = captured(device)
    old = Freed(module.linear.weight)
    REPLACED[change](module)
    gc.collect()
    assert old.expired()
    x = rows(4, device).to(module.scale.dtype)
    for _ in range(4):
        close(model(x), module(x))


def test_a_replaced_attribute_is_free_before_the_next_call(device):
    model, module = captured(device)
    old = Freed(module.table)
    module.table = new(module.table)
    assert old.expired()
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))


def test_a_weight_replaced_after_a_warmup_is_free(device):
    module = Model(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    model(rows(4, device))
    old = Freed(module.linear.weight)
    module.linear.weight = parameter(module.linear.weight)
    gc.collect()
    assert old.expired()
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))


PAST_THE_API = {
    "parameter": lambda m: dict.__setitem__(m.linear._parameters, "weight", parameter(m.linear.weight)),
    "buffer": lambda m: dict.__setitem__(m._buffers, "shift", new(m.shift)),
    "submodule": lambda m: dict.__setitem__(m._modules, "linear", nn.Linear(WIDTH, WIDTH, device=m.scale.device)),
}


@pytest.mark.parametrize("change", PAST_THE_API)
def test_a_write_past_the_api_is_noticed_and_old_memory_is_free(device, change):
    model, module = captured(device)
    old = Freed(module.shift if change == "buffer" else module.linear.weight)
    PAST_THE_API[change](module)
    gc.collect()
    assert old.expired()
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 1


def test_a_list_of_tensors_that_is_replaced_is_free_before_the_next_call(device):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.caches = [torch.randn(WIDTH, device=device) for _ in range(3)]

        def forward(self, x):
            return x + sum(self.caches)

    module = Cached().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(4):
        model(rows(4, device))
    assert model.graph_stats.replays
    old = Freed(module.caches[1])
    module.caches = None
    assert old.expired()
    module.caches = [torch.randn(WIDTH, device=device) for _ in range(3)]
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))


def test_a_module_is_free_with_its_wrapper(device):
    model, module = captured(device)
    old = Freed(module.linear.weight)
    del model, module
    gc.collect()
    assert old.expired()


class Growing(nn.Module):
    """Keeps a cache that a larger batch replaces."""

    def __init__(self, device):
        super().__init__()
        self.cache = torch.ones(2, device=device)

    def forward(self, x):
        if len(x) > len(self.cache):
            self.cache = torch.full((len(x),), float(len(x)), device=x.device)
        return x * self.cache[: len(x), None]


@pytest.mark.parametrize("upfront", [False, True])
def test_a_cache_that_a_larger_batch_replaces_is_not_read_at_its_old_place(device, upfront):
    module = Growing(device).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False, padding=False)
    other = sg.wrap(Growing(device).eval(), capture_sizes=[2, 4], progress=False, padding=False)
    eager = sg.unwrap(other)
    x = rows(2, device)
    for _ in range(3):
        close(model(x), eager(x))
    if upfront:
        model.capture_graphs(rows(4, device))
        eager(rows(4, device))
    for size in (4, 4, 4, 2, 2, 2, 4, 2):
        x = rows(size, device)
        expected = eager(x)
        close(model(x), expected)


class BySize(nn.Module):
    """Keeps a tensor for every size that it has seen."""

    def __init__(self):
        super().__init__()
        self.scales = {}

    def forward(self, x):
        name = f"scale_{len(x)}"
        if not hasattr(self, name):
            setattr(self, name, torch.full((), float(len(x)), device=x.device))
        scale = self.scales.setdefault(len(x), getattr(self, name) + 1)
        return x * scale * getattr(self, name)


def test_a_cache_by_size_that_the_forward_fills_moves_nothing(device):
    module = BySize().eval()
    model = sg.wrap(module, capture_sizes=[1, 2, 3, 4, 5, 6], progress=False)
    for _ in range(4):
        for size in range(1, 7):
            x = rows(size, device)
            close(model(x), module(x))
    assert model.graph_stats.recaptures <= 1
    assert model.graph_stats.captures <= 7
