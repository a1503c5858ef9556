"""A module that keeps tensors in every place it can, and how it is captured."""

from __future__ import annotations

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


def rows(count, device):
    return torch.randn(count, WIDTH, device=device)


def captured(device, **settings):
    """A wrapped model whose sizes 2 and 4 have been replayed, and the module itself, which stays eager."""
    module = Model(device).eval()
    model = sg.wrap(module, **{"capture_sizes": [2, 4], "progress": False, **settings})
    for size in (4, 4, 4, 2, 2, 2, 3):
        model(rows(size, device))
    assert model.graph_stats.replays >= 4
    return model, module
