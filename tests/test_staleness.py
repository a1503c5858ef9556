"""Whatever happens to what a graph reads, a call never returns numbers made from the old."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg

WIDTH = 6


class Box:
    """An ordinary object in an attribute."""

    def __init__(self, table):
        self.table = table


class Model(nn.Module):
    """Reads a parameter, a buffer, a submodule, and tensors kept in ordinary attributes."""

    def __init__(self, device):
        super().__init__()
        make = lambda: torch.randn(WIDTH, device=device)  # noqa: E731
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False, device=device)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH, device=device), nn.ReLU())
        self.scale = nn.Parameter(make())
        self.register_buffer("shift", make())
        self.register_buffer("optional", None)
        self.table = make()
        self.listed = [make(), make()]
        self.paired = (make(), make())
        self.keyed = {"a": make()}
        self.deep = {"layers": [{"k": make()}]}
        self.box = Box(make())

    def forward(self, x):
        x = self.blocks(self.linear(x)) * self.scale + self.shift + self.table
        x = x + self.listed[1] + self.paired[0] + self.keyed["a"] + self.deep["layers"][0]["k"] + self.box.table
        return x if self.optional is None else x * self.optional


def new(like):
    return torch.randn(like.shape, device=like.device) + 3


def parameter(like):
    return nn.Parameter(new(like), requires_grad=False)


def assign_state(m):
    m.load_state_dict({name: new(value) for name, value in m.state_dict().items()}, assign=True)


def copy_state(m):
    m.load_state_dict({name: new(value) for name, value in m.state_dict().items()})


def set_item(container, key, value):
    container[key] = value


def swap(m):
    other = parameter(m.linear.weight)
    torch.utils.swap_tensors(m.linear.weight, other)


def delete_and_register(m):
    del m.linear.weight
    m.linear.register_parameter("weight", parameter(torch.empty(WIDTH, WIDTH, device=m.scale.device)))


def keep_old(m):
    """The old weight stays alive elsewhere, so its memory still holds the old numbers."""
    m.kept = [m.linear.weight]
    m.linear.weight = parameter(m.linear.weight)


IN_PLACE = {
    "copy_": lambda m: m.linear.weight.copy_(new(m.linear.weight)),
    "add_ to a buffer": lambda m: m.shift.add_(1),
    ".data.copy_": lambda m: m.linear.weight.data.copy_(new(m.linear.weight)),
    "load_state_dict": copy_state,
    "attribute in place": lambda m: m.table.mul_(2),
    "attribute in a list in place": lambda m: m.listed[1].mul_(2),
    "init": lambda m: nn.init.ones_(m.linear.weight),
}

MOVED = {
    ".data =": lambda m: setattr(m.linear.weight, "data", new(m.linear.weight)),
    ".data = transposed": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
    "t_": lambda m: m.linear.weight.requires_grad_(False).t_(),
    "transpose_ of a buffer": lambda m: m.blocks[0].weight.requires_grad_(False).transpose_(0, 1),
    "set_": lambda m: m.shift.set_(new(m.shift)),
    "parameter replaced": lambda m: setattr(m.linear, "weight", parameter(m.linear.weight)),
    "parameter replaced, the old kept alive": keep_old,
    "parameter of the module itself": lambda m: setattr(m, "scale", parameter(m.scale)),
    "parameter deleted and registered": delete_and_register,
    "buffer replaced": lambda m: setattr(m, "shift", new(m.shift)),
    "buffer registered again": lambda m: m.register_buffer("shift", new(m.shift)),
    "buffer that was None": lambda m: setattr(m, "optional", new(m.shift)),
    "bias that was None": lambda m: setattr(m.linear, "bias", parameter(m.scale)),
    "bias set to None": lambda m: setattr(m.blocks[0], "bias", None),
    "written through _parameters": lambda m: m.linear._parameters.update(weight=parameter(m.linear.weight)),
    "load_state_dict(assign=True)": assign_state,
    "swap_tensors": swap,
    "submodule replaced": lambda m: setattr(m, "linear", nn.Linear(WIDTH, WIDTH, device=m.scale.device)),
    "submodule in a Sequential replaced": lambda m: set_item(m.blocks, 0, nn.Identity()),
    "submodule without parameters replaced": lambda m: set_item(m.blocks, 1, nn.Tanh()),
    "submodule appended": lambda m: m.blocks.append(nn.Tanh()),
    "submodule deleted": lambda m: m.blocks.__delitem__(1),
    "two submodules swapped": lambda m: setattr(m, "linear", m.blocks[0]),
    "attribute replaced": lambda m: setattr(m, "table", new(m.table)),
    "attribute .data =": lambda m: setattr(m.table, "data", new(m.table)),
    "item of a list replaced": lambda m: set_item(m.listed, 1, new(m.table)),
    "list replaced": lambda m: setattr(m, "listed", [new(m.table), new(m.table)]),
    "list grown at the front": lambda m: m.listed.insert(0, new(m.table)),
    "tuple replaced": lambda m: setattr(m, "paired", (new(m.table), m.paired[1])),
    "item of a dict replaced": lambda m: set_item(m.keyed, "a", new(m.table)),
    "dict replaced": lambda m: setattr(m, "keyed", {"a": new(m.table)}),
    "deep inside": lambda m: set_item(m.deep["layers"][0], "k", new(m.table)),
    "deep container replaced": lambda m: set_item(m.deep["layers"], 0, {"k": new(m.table)}),
    "attribute of an object": lambda m: setattr(m.box, "table", new(m.table)),
    "object replaced": lambda m: setattr(m, "box", Box(new(m.table))),
    "forward hook": lambda m: m.linear.register_forward_hook(lambda *call: call[-1] * 2),
    "forward pre-hook": lambda m: m.blocks.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def rows(count, device):
    return torch.randn(count, WIDTH, device=device)


def reasons(model):
    return {reason.value: count for reason, count in model.graph_stats.eager.items()}


def captured(device, **settings):
    """A wrapped model whose sizes 2 and 4 have been replayed, and the module itself, which stays eager."""
    module = Model(device).eval()
    model = sg.wrap(module, **{"capture_sizes": [2, 4], "progress": False, **settings})
    for size in (4, 4, 4, 2, 2, 2, 3):
        model(rows(size, device))
    assert model.graph_stats.replays >= 4
    return model, module


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("change", IN_PLACE)
def test_an_update_in_place_is_seen_without_a_recapture(device, change):
    model, module = captured(device)
    IN_PLACE[change](module)
    for size in (4, 2, 3):
        x = rows(size, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.captures == 2


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


@pytest.mark.parametrize("change", MOVED)
def test_configured_to_raise_a_stale_graph_names_what_moved(device, change):
    model, module = captured(device, on_stale="raise")
    MOVED[change](module)
    for _ in range(2):
        with pytest.raises(sg.StaleGraphError, match="reset_graphs"):
            model(rows(4, device))
    model.reset_graphs()
    for size in (4, 4, 4, 2, 2, 3):
        x = rows(size, device)
        close(model(x), module(x))
    assert model.graph_stats.captures >= 3


def test_the_error_about_a_stale_graph_names_the_parameter(device):
    model, module = captured(device, on_stale="raise")
    module.blocks[0].weight = parameter(module.blocks[0].weight)
    with pytest.raises(sg.StaleGraphError, match=r"blocks\.0\.weight"):
        model(rows(4, device))


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


def test_a_tensor_from_a_closure_stays_alive_after_its_user_let_it_go(device):
    def build():
        table = torch.full((WIDTH,), 3.0, device=device)

        class Adds(nn.Module):
            def forward(self, x):
                return x + holder["table"]

        holder = {"table": table}
        return Adds().eval(), holder

    module, holder = build()
    model = sg.wrap(module, capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    del holder["table"]
    gc.collect()
    junk = [torch.full((WIDTH,), -1.0, device=device) for _ in range(100)]
    x = rows(4, device)
    close(model(x), x + 3)
    del junk


GLOBAL = {}


def test_a_global_tensor_freed_after_the_capture_stays_alive(device):
    class Reads(nn.Module):
        def forward(self, x):
            return x * GLOBAL["scale"] + GLOBAL["bias"].sum()

    GLOBAL.update(scale=torch.full((WIDTH,), 2.0, device=device), bias=torch.ones(3, device=device))
    model = sg.wrap(Reads().eval(), capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    GLOBAL.clear()
    gc.collect()
    junk = [torch.full((WIDTH,), -1.0, device=device) for _ in range(100)]
    x = rows(4, device)
    close(model(x), x * 2 + 3)
    del junk


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
