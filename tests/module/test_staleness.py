"""Whatever happens to what a graph reads, a call never returns numbers made from the old."""

from __future__ import annotations

import functools
import types
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.stateful import MOVED, WIDTH, Model, captured, new, parameter, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def copy_state(m):
    m.load_state_dict({name: new(value) for name, value in m.state_dict().items()})


IN_PLACE = {
    "copy_": lambda m: m.linear.weight.copy_(new(m.linear.weight)),
    "add_ to a buffer": lambda m: m.shift.add_(1),
    ".data.copy_": lambda m: m.linear.weight.data.copy_(new(m.linear.weight)),
    "load_state_dict": copy_state,
    "attribute in place": lambda m: m.table.mul_(2),
    "attribute in a list in place": lambda m: m.listed[1].mul_(2),
    "init": lambda m: nn.init.ones_(m.linear.weight),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_an_update_in_place_is_seen_without_a_recapture(device, change):
    model, module = captured(device)
    IN_PLACE[change](module)
    for size in (4, 2, 3):
        x = rows(size, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.captures == 2


class Source:
    """What a hook reads, by its names: a tensor, a number, and a tensor in a dict."""

    def __init__(self, device):
        self.table, self.number, self.keyed = (
            torch.ones(WIDTH, device=device),
            1.0,
            {"a": torch.ones(WIDTH, device=device)},
        )

    def change(self):
        self.table, self.number, self.keyed["a"] = self.table + 1, self.number + 1, self.keyed["a"] + 1

    def __call__(self, *call):
        return self.scaled(call[-1])

    def scaled(self, found):
        x = found if type(found) is torch.Tensor else found[0]
        return x * self.table * self.number + self.keyed["a"]


def closure(source):
    return lambda *call: source.scaled(call[-1])


def inner_closure(source):
    keyed = source.keyed

    def hook(*call):
        return Source.scaled(source, call[-1]) * keyed["a"]

    return hook


HOOKS = {
    "closure": closure,
    "inner closure": inner_closure,
    "method": lambda source: lambda *call: source(*call),
    "object": lambda source: source,
    "partial": lambda source: functools.partial(Source.__call__, source),
}


@pytest.mark.parametrize("where", ["pre-hook of a layer", "hook of a layer", "hook of the module"])
@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
def test_what_a_hooks_code_reads_is_never_that_of_the_capture(device, make, where):
    """It runs in the forward, and is a part of it."""
    source, module = Source(device), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).to(device).eval()
    model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    owner = module if where.endswith("the module") else module[0]
    (owner.register_forward_pre_hook if "pre" in where else owner.register_forward_hook)(make(source))
    for _ in range(3):
        for size in (4, 2, 3, 4, 2):
            x = rows(size, device)
            close(model(x), module(x))
        source.change()
    assert model.graph_stats.replays


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
@pytest.mark.parametrize("change", MOVED)
def test_whatever_is_moved_or_replaced_is_never_read_at_its_old_place(device, change, capture):
    if capture == "lazy":
        model, module = captured(device)
    else:
        module = Model(device).eval()
        model = sg.wrap(module, capture_sizes=[2, 4], progress=False)
        model.capture_graphs(rows(4, device))
    MOVED[change](module)
    for size in (4, 2, 3, 4, 4, 2, 2, 3):
        x = rows(size, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 1
    assert reasons(model).get("capture_failed") is None
    before = model.graph_stats.replays
    model(rows(4, device))
    assert model.graph_stats.replays == before + 1


@pytest.mark.parametrize(
    "convert", [torch.float64, torch.float16, torch.bfloat16], ids=["float64", "float16", "bfloat16"]
)
def test_a_module_moved_to_another_dtype_and_back_is_right_each_time(device, convert):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    for dtype in (torch.float32, convert, torch.float32):
        model.to(dtype)
        for _ in range(4):
            x = rows(4, device).to(dtype)
            torch.testing.assert_close(model(x), module(x), rtol=2e-2, atol=2e-2)
    assert model.graph_stats.captures == 3


def test_moving_a_module_where_it_is_already_recaptures_nothing(device):
    model, module = captured(device)
    module.to(device)
    module.float()
    module.eval()
    module.requires_grad_(False)
    x = rows(4, device)
    close(model(x), module(x))
    assert model.graph_stats.recaptures == 0


def test_a_module_moved_to_the_cpu_is_right_there(device):
    if device.type != "cuda":
        pytest.skip("needs two devices")
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    for place in (device, torch.device("cpu"), device):
        model.to(place)
        for _ in range(4):
            x = rows(4, place)
            close(model(x), module(x))


def test_resizing_a_cache_that_grew_is_noticed(device):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(WIDTH, device=device))

        def forward(self, x):
            return x * self.cache[:WIDTH]

    module = Cached().eval()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    module.cache.resize_(100_000).fill_(3.0)
    x = rows(4, device)
    close(model(x), x * 3)
    module.cache.untyped_storage().resize_(4_000_000)
    module.cache.fill_(5.0)
    close(model(x), x * 5)


def test_a_changed_mode_of_a_submodule_is_noticed(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[64])
    x = rows(64, device)
    for _ in range(3):
        close(model(x), module[0](x))
    module[1].train()
    assert (model(x) == 0).any()
    module[1].eval()
    close(model(x), module[0](x))


def test_a_removed_hook_is_gone_from_the_answer(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device).eval()
    handle = module[0].register_forward_hook(lambda *call: call[-1] * 2)
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        close(model(x), module(x))
    handle.remove()
    close(model(x), module[0](x))


def test_weights_given_for_one_call_are_used_in_it_and_in_no_other(device):
    model, module = captured(device)
    for turn in range(6):
        x = rows(4, device)
        other = {name: new(value) for name, value in module.named_parameters()}
        expected = torch.func.functional_call(module, other, (x,))
        close(torch.func.functional_call(model, other, (x,)), expected)
        close(model(x), module(x))
        if turn % 2:
            close(model(x), module(x))


def test_capturing_stops_when_no_graph_serves_more_than_the_call_it_was_captured_in(device, caplog):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(20):
        x = rows(4, device)
        close(model(x), module(x))
        if model.graph_stats.graphs:
            module.weight = parameter(module.weight)
    assert model.graph_stats.captures <= 4
    assert reasons(model)["stale_too_often"] > 5
    assert "keeps moving" in caplog.text
    assert "weight" in caplog.text


def test_capturing_goes_on_where_graphs_serve_a_while_between_changes(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(6):
        for _ in range(5):
            x = rows(4, device)
            close(model(x), module(x))
        module.weight = parameter(module.weight)
    assert model.graph_stats.captures == 6
    assert "stale_too_often" not in reasons(model)


def test_weights_replaced_before_every_call_end_in_eager_with_a_reason(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = rows(4, device)
    for _ in range(3):
        model.capture_graphs(x)
        module.weight = parameter(module.weight)
        close(model(x), module(x))
    with pytest.raises(sg.InputError, match="moving"):
        model.capture_graphs(x)
    assert reasons(model)["stale_too_often"] == 1
    close(model(x), module(x))
    model.reset_graphs()
    for _ in range(3):
        close(model(x), module(x))
    assert model.graph_stats.graphs


def test_debug_names_a_static_input_that_was_moved(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], debug=True, progress=False)
    model.capture_graphs(rows(4, device))
    static = model.static_inputs(4)["input"]
    x = rows(4, device)
    close(model(x), module(x))
    static.untyped_storage().resize_(10_000_000)
    with pytest.raises(sg.StaleGraphError, match="input"):
        model(x)
    model.reset_graphs()
    for _ in range(3):
        close(model(x), module(x))


def test_a_container_whose_items_are_made_when_they_are_read_recaptures_nothing(device):
    class Views(dict):
        def __getitem__(self, key):
            return super().__getitem__(key).detach()

    module = Model(device).eval()
    module.views = Views(shift=torch.ones(WIDTH, device=device))
    module.register_forward_hook(lambda module, args, output: output + module.views["shift"].sum())
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(4):
        model(rows(4, device))
    module.train()
    module.eval()  # as it was: somebody has to look
    module.views["shift"].mul_(2)
    x, replays = rows(4, device), model.graph_stats.replays
    close(model(x), module(x))
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.replays == replays + 1


class Terms(tuple):
    """Terms of a sum, whose number of rows no length tells, as e3nn's representations."""

    def __len__(self):
        raise NotImplementedError


class Defaults(dict):
    """Items that come with others, which are not there."""

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


class Steps(list):
    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


UNTOLD = {
    "terms": lambda: Terms([(1, 2), (3, (4, 5))]),
    "dict": lambda: Defaults(a=1),
    "empty dict": Defaults,
    "list": lambda: Steps([[1]]),
}
PLACES = {
    "attribute": lambda held: held,
    "inside": lambda held: {"k": [held]},
    "object": lambda held: types.SimpleNamespace(a=held),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("made", UNTOLD.values(), ids=UNTOLD)
def test_a_container_that_does_not_tell_its_length_is_no_obstacle(device, made, place):
    module = Model(device).eval()
    module.held = place(made())
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for turn in range(8):
        x = rows(4 - turn % 2, device)
        close(model(x), module(x))
    replays = model.graph_stats.replays
    module.linear.weight.data = torch.randn_like(module.linear.weight)
    for _ in range(3):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.replays > replays > 2


def test_a_child_that_knows_its_parent_by_a_proxy_is_served(device):
    module = Model(device).eval()
    object.__setattr__(module.linear, "parent", weakref.proxy(module))  # past `nn.Module`, which would make it a child
    other = nn.Identity()
    module.linear.gone = [weakref.proxy(other)]
    del other
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.replays == 3


def test_what_takes_the_place_of_a_freed_parameter_never_gets_its_address_while_graphs_read_it(device):
    if device.type != "cpu":
        pytest.skip("on a GPU a graph reads what is at the address, whoever's it is")
    model, module = captured(device)
    address = module.linear.weight.data_ptr()
    del module.linear.weight
    others = [torch.empty(WIDTH, WIDTH, device=device) for _ in range(1000)]
    assert address not in [other.data_ptr() for other in others]
    module.linear.register_parameter("weight", parameter(others[0]))
    x = rows(4, device)
    close(model(x), module(x))


def test_what_moves_too_often_is_warned_of_once(device, caplog):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(20):
        model(rows(4, device))
        if model.graph_stats.graphs:
            module.weight = parameter(module.weight)
    assert reasons(model)["stale_too_often"] > 5
    assert caplog.text.count("keeps moving") == 1


def test_a_tensor_that_is_added_where_a_forward_asks_for_it_is_noticed(device):

    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y, table = self.linear(x), getattr(self, "table", None)
            return y if table is None else y + table

    module = Asks().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        for table in (None, torch.ones(WIDTH, device=device), torch.full((WIDTH,), 3.0, device=device)):
            if table is not None:
                module.table = table
            for _ in range(4):
                x = torch.randn(4, WIDTH, device=device)
                torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays


def reading_of(module, device):
    """Return the reading of a module that replays."""
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, WIDTH, device=device))
    reading = model._graph_runner.builder.state.reading
    assert reading.holds(vars(module))
    return reading


def test_a_reading_tells_an_added_attribute(device):
    module = nn.Linear(WIDTH, WIDTH, device=device).eval()
    reading = reading_of(module, device)
    module.note = 1
    assert not reading.holds(vars(module))


def test_a_replaced_buffer_without_an_address_is_noticed(device):
    """A sparse tensor has none: it counts by identity."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, device=device)
            self.register_buffer("mask", torch.eye(WIDTH, device=device).to_sparse())

        def forward(self, x):
            return self.linear(x)

    module = Masked().eval()
    reading = reading_of(module, device)
    module.mask = torch.zeros(WIDTH, WIDTH, device=device).to_sparse()
    assert not reading.holds(vars(module))
