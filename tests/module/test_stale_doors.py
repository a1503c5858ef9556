"""Less usual ways to change what a forward reads or runs: none of them lets a replay return the old answer."""

from __future__ import annotations

import collections
import collections.abc
import copy
import pickle
import types

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.guard import guards as state
from simplegraph.guard import versions
from simplegraph.guard.survey import Survey
from tests.module.answers import close
from tests.module.stateful import WIDTH, captured, new, parameter, rows

pytestmark = pytest.mark.usefixtures("no_grad")


class Holder:
    """An ordinary object that keeps a module."""

    def __init__(self, module):
        self.module = module


class Scale:
    """A callable object."""

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by


class Bare:
    pass


class Table(dict):
    pass


# What holds no tensor at first, and gets one under a name or a key.
FILLED_LATER = {
    "dict of numbers": lambda: {"n": 1},
    "list of an empty list": lambda: [[]],
    "deque": collections.deque,
    "defaultdict": lambda: collections.defaultdict(list),
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "UserDict": collections.UserDict,
    "ChainMap": collections.ChainMap,
    "dict of a class of its own": Table,
    "namespace": types.SimpleNamespace,
    "namespace of None": lambda: types.SimpleNamespace(t=None),
    "object": Bare,
}


def fill(held, tensor):
    """Put a tensor where there was none."""
    if isinstance(held, list):
        held[0].append(tensor)
    elif isinstance(held, collections.deque):
        held.append(tensor)
    elif isinstance(held, collections.abc.MutableMapping):
        held["t"] = tensor
    else:
        held.t = tensor


def added(x, held):
    """Add what was put there."""
    if isinstance(held, (list, collections.deque)):
        held = held[0] if isinstance(held, list) else held
        return x + held[0] if held else x
    found = held.get("t") if isinstance(held, collections.abc.MutableMapping) else vars(held).get("t")
    return x if found is None else x + found


class Odd(nn.Module):
    """Keeps modules and tensors where `named_modules` does not find them, and reads what is not there yet."""

    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.hidden = [nn.Linear(WIDTH, WIDTH, device=device), nn.ReLU()]
        self.keyed = {"a": nn.Sequential(nn.Linear(WIDTH, WIDTH, device=device))}
        self.holder = Holder(nn.Linear(WIDTH, WIDTH, device=device))
        self.mask = None
        self.extra = []
        self.more = [torch.randn(WIDTH, device=device)]
        vars(self).update({name: make() for name, make in FILLED_LATER.items()})
        self.scale = Scale(torch.ones(WIDTH, device=device))
        self.act = torch.tanh
        self.blocks = nn.Sequential(collections.OrderedDict(one=nn.Tanh(), two=nn.Linear(WIDTH, WIDTH, device=device)))
        self.kind = type("Kind", (nn.Tanh,), {})()
        self.hooked = nn.Identity()
        self.hooked.register_forward_hook(lambda *call: call[-1] + 1)

    def forward(self, x):
        for layer in self.hidden:
            x = layer(x)
        x = self.kind(x)
        x = self.hooked(self.blocks(self.holder.module(self.keyed["a"](self.linear(x)))))
        for tensor in (*self.extra, *self.more):
            x = x + tensor
        for name in FILLED_LATER:
            x = added(x, vars(self)[name])
        x = self.scale(x)
        return self.act(x if self.mask is None else x * self.mask)


def other_parameters(module):
    return {name: parameter(old) for name, old in module.named_parameters()}


def ordered(m):
    m.linear._parameters = collections.OrderedDict(other_parameters(m.linear))


def reorder(m):
    m.blocks._modules = dict(reversed(m.blocks._modules.items()))


def doubled(*call):
    return call[-1] * 2


def doubling(_, args):
    return (args[0] * 2,)


def replace_hooks(m):
    m.hooked._forward_hooks.update(dict.fromkeys(m.hooked._forward_hooks, doubled))


def swap_from_the_other(weight):
    torch.utils.swap_tensors(parameter(weight), weight)


def with_class(module, kind):
    module.__class__ = kind


class Negated(nn.Linear):
    def forward(self, x):
        return -super().forward(x)


CHANGES = {
    "weight of a module in a list": lambda m: setattr(m.hidden[0], "weight", parameter(m.linear.weight)),
    ".data of a weight in a list": lambda m: setattr(m.hidden[0].weight, "data", new(m.linear.weight)),
    "module in a list": lambda m: m.hidden.__setitem__(1, nn.Tanh()),
    "module appended to a list": lambda m: m.hidden.append(nn.Tanh()),
    "weight of a module below one in a dict": lambda m: setattr(m.keyed["a"][0], "weight", parameter(m.linear.weight)),
    "module in a dict": lambda m: m.keyed.update(a=nn.ReLU()),
    "weight of a module in an object": lambda m: setattr(m.holder.module, "bias", parameter(m.linear.bias)),
    "module in an object": lambda m: setattr(m.holder, "module", nn.ReLU()),
    "module in a module in a dict": lambda m: m.keyed["a"].append(nn.ReLU()),
    "None becomes a tensor": lambda m: setattr(m, "mask", new(m.linear.bias)),
    "empty list becomes one of a tensor": lambda m: setattr(m, "extra", [new(m.linear.bias)]),
    "list grows at its end": lambda m: m.more.append(new(m.linear.bias)),
    "list loses all": lambda m: m.more.clear(),
    "forward of a child": lambda m: setattr(m.linear, "forward", torch.relu),
    "forward of a child in a list": lambda m: setattr(m.hidden[1], "forward", torch.tanh),
    "forward of the module": lambda m: setattr(m, "forward", types.MethodType(lambda self, x: x * 3, m)),
    "function in an attribute": lambda m: setattr(m, "act", torch.relu),
    "hook on the module itself": lambda m: m.register_forward_hook(doubled),
    "pre-hook on the module itself": lambda m: m.register_forward_pre_hook(doubling),
    "hook on a module in a list": lambda m: m.hidden[0].register_forward_hook(doubled),
    "hook put for another under its key": replace_hooks,
    "hook taken out of the dict": lambda m: m.hooked._forward_hooks.clear(),
    "hook beside another": lambda m: m.hooked.register_forward_hook(doubled),
    "swap_tensors, the other way round": lambda m: swap_from_the_other(m.linear.weight),
    "swap_tensors in a list": lambda m: swap_from_the_other(m.hidden[0].weight),
    "tensor of an object that is called": lambda m: setattr(m.scale, "by", new(m.linear.bias)),
}
CHANGES |= {
    f"a tensor in the {name}": lambda m, name=name: fill(vars(m)[name], new(m.linear.bias)) for name in FILLED_LATER
}


def replayed(device, **settings):
    module = Odd(device).eval().requires_grad_(False)
    model = sg.wrap(module, capture_sizes=[4], progress=False, **settings)
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.replays >= 1
    return model, module


def class_forward(m):
    type(m.kind).forward = lambda self, x: x * 2


PAST_THE_API = {
    "class of a child": lambda m: with_class(m.linear, Negated),
    "_parameters replaced": lambda m: setattr(m.linear, "_parameters", other_parameters(m.linear)),
    "_parameters replaced by an OrderedDict": ordered,
    "_modules replaced": lambda m: setattr(m.blocks, "_modules", {"one": nn.ReLU()}),
    "_modules in another order": reorder,
    "forward of a class": class_forward,
    "vars()": lambda m: vars(m).update(mask=new(m.linear.bias)),
    "hook written beside another": lambda m: m.hooked._forward_hooks.update({999: doubled}),
    "hook dict replaced": lambda m: setattr(m.linear, "_forward_hooks", collections.OrderedDict({1: doubled})),
    "__dict__ of a submodule replaced": lambda m: setattr(
        m.linear, "__dict__", vars(m.linear) | {"_parameters": other_parameters(m.linear)}
    ),
    "dict.update": lambda m: dict.update(m.linear._parameters, weight=parameter(m.linear.weight)),
    "dict.__setitem__ of a module": lambda m: dict.__setitem__(m._modules, "linear", nn.ReLU()),
    "the operator of set_": lambda m: torch.ops.aten.set_.source_Tensor(m.more[0], new(m.more[0])),
    "shape at the same address": lambda m: setattr(m.linear.bias, "data", m.linear.bias.data[:1]),
    "strides at the same address": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
}
CHANGES |= PAST_THE_API

# No call looks at these; the documentation lists them.
UNNOTICED = {
    "hook written into an empty dict": lambda m: m.linear._forward_hooks.__setitem__(12345, doubled),
}


@pytest.mark.parametrize("with_versions", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_no_change_of_what_a_forward_reads_or_runs_is_missed(device, change, with_versions, monkeypatch):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    model, module = replayed(device)
    CHANGES[change](module)
    for _ in range(5):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 1
    before = model.graph_stats.replays
    model(rows(4, device))
    assert model.graph_stats.replays == before + 1


@pytest.mark.parametrize("change", UNNOTICED)
def test_debug_finds_what_no_call_looks_at(device, change):
    model, module = replayed(device, debug=True)
    UNNOTICED[change](module)
    with pytest.raises(sg.StaleGraphError, match="reset_graphs"):
        model(rows(4, device))
    model.reset_graphs()


@pytest.mark.parametrize("change", UNNOTICED)
def test_what_no_call_looks_at_is_found_with_the_next_change(device, change):
    model, module = replayed(device)
    UNNOTICED[change](module)
    module.more[0] = new(module.more[0])
    x = rows(4, device)
    close(model(x), module(x))


class Reads(nn.Module):
    """Reads what may be gone."""

    def __init__(self, device):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, device=device)
        self.tables, self.extra, self.slope = [torch.ones(WIDTH, device=device)], torch.ones(WIDTH, device=device), None
        self.leaky = nn.LeakyReLU(0.5)
        self.box = Guarded(torch.ones(WIDTH, device=device))

    def forward(self, x):
        x = self.leaky(self.linear(x)) + object.__getattribute__(self.box, "table")
        for tensor in (*(self.tables or ()), *([self.extra] if hasattr(self, "extra") else [])):
            x = x + tensor
        return x


class Guarded:
    """Raises whenever anything of it is asked for, once it is told to."""

    def __init__(self, table):
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "raises", False)

    def __getattribute__(self, name):
        if object.__getattribute__(self, "raises"):
            raise ZeroDivisionError(name)
        return object.__getattribute__(self, name)


GONE = {
    "list replaced by None": lambda m: setattr(m, "tables", None),
    "list emptied": lambda m: m.tables.clear(),
    "attribute deleted": lambda m: delattr(m, "extra"),
    "an object that raises": lambda m: object.__setattr__(m.box, "raises", True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", GONE)
def test_what_cannot_be_read_any_more_is_no_error_of_the_call(device, change, grad):
    module = Reads(device).eval().requires_grad_(False)
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            model(rows(4, device))
        assert model.graph_stats.replays
        GONE[change](module)
        for _ in range(4):
            x = rows(4, device)
            close(model(x), module(x))


@pytest.mark.parametrize(("name", "value"), [("leaky.negative_slope", 0.5), ("slope", None)])
def test_a_tensor_that_equals_the_number_or_the_nothing_it_replaces_is_noticed(device, name, value):
    module = Reads(device).eval().requires_grad_(False)
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(4):
        model(rows(4, device))
    runner = model._graph_runner
    state, values = runner.builder.state, runner._calls.plain(module)
    assert not state.moved()
    owner = module.leaky if "." in name else module
    setattr(owner, name.rpartition(".")[2], torch.tensor(0.5 if value is None else value))
    assert not state.reading.holds(vars(module)) or runner._calls.plain(module) is not values


def test_training_mode_of_a_child_set_as_an_attribute_is_noticed(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[64])
    x = rows(64, device)
    for _ in range(3):
        close(model(x), module[0](x))
    module[1].training = True
    assert (model(x) == 0).any()
    module[1].training = False
    close(model(x), module[0](x))


class Noisy(nn.Module):
    def __init__(self, device, holder, key):
        super().__init__()
        self.holder, self.key = holder, key
        self.replace(torch.Generator(device))

    @property
    def place(self):
        return vars(self.holder) if isinstance(self.holder, types.SimpleNamespace) else self.holder or vars(self)

    def replace(self, generator):
        self.place[self.key] = generator

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.place[self.key], device=x.device)


@pytest.mark.parametrize(
    ("holder", "key"),
    [(None, "generator"), ([0], 0), ({"deep": 0}, "deep"), (types.SimpleNamespace(deep=0), "deep")],
    ids=["attribute", "list", "dict", "object"],
)
def test_a_generator_that_is_held_anywhere_is_drawn_from_also_when_it_is_replaced(holder, key, device):
    module = Noisy(device, holder, key).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for seed in (1, 2, 3):
        same = torch.Generator(device).manual_seed(seed)
        module.replace(torch.Generator(device).manual_seed(seed))
        for _ in range(4):
            close(model(x), x + torch.rand(x.shape, generator=same, device=device))
    assert model.graph_stats.replays >= 6


def test_growing_the_base_of_a_view_that_is_read_is_noticed(device):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = base[1]

        def forward(self, x):
            return x + self.rows

    base = torch.ones(2, WIDTH, device=device)
    module = Viewing().eval()
    for grow in (
        lambda: base.resize_(1000, WIDTH),
        lambda: base.resize_as_(torch.empty(2000, WIDTH)),
        lambda: torch.resize_as_(base, torch.empty(3000, WIDTH)),
    ):
        model = sg.wrap(module, capture_sizes=[4])
        x = rows(4, device)
        for _ in range(3):
            close(model(x), module(x))
        grow()
        base[1].fill_(5)
        close(model(x), x + 5)
        close(model(x), x + 5)


def watch_looks(monkeypatch):
    """Return a list that grows whenever a call looks at all of a module."""
    looks = []
    monkeypatch.setattr(state, "Survey", lambda module: looks.append(module) or Survey(module))
    return looks


def replace_weight(model, module, x):
    module.linear.weight.data = new(module.linear.weight)
    close(model(x), module(x))


def test_moving_a_module_where_it_is_already_makes_no_call_look(device, monkeypatch):
    model, module = captured(device)
    model(rows(4, device))
    looks = watch_looks(monkeypatch)
    for _ in range(2):  # as libraries do before every call
        module.to(device)
        module.float()
        x = rows(4, device)
        close(model(x), module(x))
    assert not looks
    replace_weight(model, module, x)
    assert looks


@torch.inference_mode()
def test_a_module_of_inference_tensors_is_watched(device):
    model, module = replayed(device)
    assert module.linear.weight.is_inference()
    module.linear.weight = parameter(module.linear.weight)
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))
    assert model.graph_stats.recaptures == 1


TABLE = torch.ones(2, WIDTH)


class ReadsGlobal(nn.Module):
    def forward(self, x):
        return x * TABLE[1]


def test_a_global_tensor_whose_views_are_read_is_watched(device):
    TABLE.data = torch.ones(2, WIDTH, device=device)
    module = ReadsGlobal().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = rows(4, device)
    for value in (2, 3):
        for _ in range(4):
            close(model(x), module(x))
        TABLE.data = torch.full((2, WIDTH), float(value), device=device)
    close(model(x), x * 3)
    assert model.graph_stats.recaptures == 2


def test_an_attribute_that_no_forward_reads_may_change_at_every_call(device):
    model, module = replayed(device)
    for step in range(6):
        module.last = rows(4, device)
        module.step = step
        module.log = [step]
        close(model(rows(4, device)), model(rows(4, device)) * 0 + model(rows(4, device))) if False else model(
            rows(4, device)
        )
    assert model.graph_stats.recaptures <= 1


def test_modules_in_a_list_are_no_part_of_the_wrapped_module(device):
    _, module = replayed(device)
    assert not any(name.startswith("hidden") for name, _ in module.named_parameters())


def test_each_dict_of_a_watched_module_pickles_and_copies_as_a_plain_one(device):
    model = sg.wrap(nn.Linear(WIDTH, WIDTH).to(device).eval(), capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    for other in (copy.deepcopy(sg.unwrap(model)), pickle.loads(pickle.dumps(sg.unwrap(model)))):
        assert type(other._parameters) is dict
        assert type(other._forward_hooks) is collections.OrderedDict
        handle = other.register_forward_hook(doubled)
        handle.remove()
        assert not other._forward_hooks


class OfOneName(nn.Module):
    """Modules, or random generators, whose names are the same once they are written out."""

    def __init__(self, one, other):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.held = {1: one, "1": other}

    def forward(self, x):
        h = self.first(x)
        for each in self.held.values():
            h = each(h) if isinstance(each, nn.Module) else h + torch.rand(WIDTH, device=h.device, generator=each)
        return h


def served(module, device):
    """A wrapped module whose last calls were replays, and their input."""
    model, x = sg.wrap(module, capture_sizes=[4], progress=False), rows(4, device)
    for _ in range(5):
        model(x)
    assert model.graph_stats.replays >= 2
    return model, x


@pytest.mark.parametrize("key", [1, "1"])
def test_modules_of_one_name_are_each_compared(key, device):
    module = OfOneName(*(nn.Linear(WIDTH, WIDTH).to(device) for _ in range(2))).eval().to(device)
    model, x = served(module, device)
    module.held[key] = nn.Linear(WIDTH, WIDTH, device=device)
    close(model(x), module(x))
    assert model.graph_stats.recaptures == 1


@pytest.mark.parametrize("key", [1, "1"])
def test_generators_of_one_name_are_each_compared(key, device):
    module = OfOneName(*(torch.Generator(device).manual_seed(seed) for seed in (1, 2))).eval().to(device)
    model, x = served(module, device)
    module.held[key] = torch.Generator(device).manual_seed(5)
    states = {name: each.get_state() for name, each in module.held.items()}
    answer = model(x)
    for name, each in module.held.items():
        each.set_state(states[name])
    close(answer, module(x))


def test_an_attribute_in_front_of_a_child_of_its_name_is_captured(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).eval().to(device)
    vars(module)["1"] = nn.Sigmoid()
    model, x = served(module, device)
    close(model(x), module(x))
