"""Random modules, arguments and batch sizes: always eager's answer, and outputs that stay as they were."""

from __future__ import annotations

import collections
import contextlib
import dataclasses

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.nested import flatten

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

WIDTH = 5
QUICK = hypothesis.settings(
    max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)

LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "softmax": lambda: nn.Softmax(-1),
    "residual": lambda: Residual(),
    "counter": lambda: Counter(),
    "reversed features": lambda: Flip(),
    "noise": lambda: Noise(),
}

OUTPUTS = {
    "tensor": lambda x, y: y,
    "pair": lambda x, y: (y, y.sum(-1)),
    "dict": lambda x, y: {"y": y, "x": x, "n": None},
    "columns": lambda x, y: y.t(),
    "two for one": lambda x, y: [y.repeat_interleave(2, 0), y > 0],
    "aliases": lambda x, y: (x, y, y[:, 1:], x[:, ::2]),
}


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Flip(nn.Module):
    def forward(self, x):
        return x.flip(-1)


class Counter(nn.Module):
    """State that every call changes and every output shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x + self.count


class Noise(nn.Module):
    """One random number for the whole batch, so that padding draws no more of them."""

    def forward(self, x):
        return x + torch.rand(1, device=x.device)


class Stack(nn.Module):
    def __init__(self, layers, output):
        super().__init__()
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))
        self.output = output

    def forward(self, x):
        return OUTPUTS[self.output](x, self.layers(x))


def same(actual, expected):
    leaves, spec = flatten(actual)
    others, other_spec = flatten(expected)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        else:
            assert one == other


STEPS = st.one_of(
    st.sampled_from([4, 4, 3, 6, 1, 9]),
    st.sampled_from([4, 4, 3, 6, 1, 9]),
    st.sampled_from(["eager", "inference", "replace", "in place", "reset", "static"]),
)


@QUICK
@hypothesis.given(
    layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4),
    output=st.sampled_from(sorted(OUTPUTS)),
    sizes=st.sampled_from([[4], [4, 6], [1, 4, 8], [3, 6], [16]]),
    steps=st.lists(STEPS, min_size=12, max_size=30),
    num_warmups=st.integers(0, 2),
    padding=st.booleans(),
    outputs=st.sampled_from(["clone", "static"]),
)
def test_any_module_at_any_sequence_of_sizes_equals_eager(
    device, layers, output, sizes, steps, num_warmups, padding, outputs
):
    torch.manual_seed(1)
    reference = Stack(layers, output).to(device).eval()
    torch.manual_seed(1)
    module = Stack(layers, output).to(device).eval()
    model = sg.wrap(
        module, capture_sizes=sizes, num_warmups=num_warmups, padding=padding, outputs=outputs, progress=False
    )
    kept = []
    size = 2
    for turn, step in enumerate(steps):
        change(model, reference, step, device)
        size = step if isinstance(step, int) else size
        x = torch.randn(size, WIDTH, device=device)
        if step == "static" and model.graph_stats.graphs:
            with contextlib.suppress(sg.CaptureSizeError):
                x = model.static_inputs(size)["x"].copy_(x)
        with torch.inference_mode() if step == "inference" else torch.no_grad():
            with sg.eager() if step == "eager" else contextlib.nullcontext():
                torch.manual_seed(turn)
                copy = x.clone()
                actual = model(x)
            torch.manual_seed(turn)
            expected = reference(copy)
        same(actual, expected)
        if outputs == "clone" and step != "static":
            kept.append(
                (actual, [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flatten(actual)[0]])
            )
    for returned, then in kept:
        for now, before in zip(flatten(returned)[0], then, strict=True):
            assert now is before or torch.equal(now, before)
    counted = model.graph_stats.replays + sum(model.graph_stats.eager.values())
    assert counted == len(steps)


def change(model, reference, step, device):
    if step == "reset":
        model.reset_graphs()
    if step not in ("replace", "in place"):
        return
    state = {
        name: torch.rand_like(value) if value.dtype.is_floating_point else value
        for name, value in reference.state_dict().items()
    }
    for each in (model, reference):
        copied = {name: value.clone() for name, value in state.items()}
        each.load_state_dict(copied, assign=step == "replace")
        each.requires_grad_(False)


# Random nested arguments.


@dataclasses.dataclass
class Record:
    first: object
    second: object


Pair = collections.namedtuple("Pair", ["left", "right"])

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, 1.5]),
    st.sampled_from(["a", "b", ""]),
)
TENSORS = st.sampled_from(["rows", "columns", "vector", "fixed"])
NESTED = st.recursive(
    st.one_of(SCALARS, TENSORS.map(lambda kind: ("tensor", kind))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.builds(Record, inner, inner),
        st.dictionaries(st.sampled_from(["x", "y", "z"]), inner, max_size=3),
    ),
    max_leaves=6,
)
SHAPES = {
    "rows": lambda size: (size, WIDTH),
    "columns": lambda size: (11, size),
    "vector": lambda size: (size,),
    "fixed": lambda size: (13, 1),
}


def filled(form, size, device):
    """The form with tensors in place of their descriptions."""
    if isinstance(form, tuple) and not isinstance(form, Pair):
        return torch.randn(SHAPES[form[1]](size), device=device)
    if isinstance(form, list):
        return [filled(item, size, device) for item in form]
    if isinstance(form, Pair):
        return Pair(*(filled(item, size, device) for item in form))
    if isinstance(form, Record):
        return Record(filled(form.first, size, device), filled(form.second, size, device))
    if isinstance(form, dict):
        return {key: filled(item, size, device) for key, item in form.items()}
    return form


class Reduces(nn.Module):
    """Depends on every tensor, on every value, on its type and on where it stands."""

    def forward(self, x, tree, *, option=None):
        result = x
        leaves, spec = flatten((tree, option))
        for place, leaf in enumerate(leaves, start=1):
            if not isinstance(leaf, torch.Tensor):
                result = result + place * (len(repr(leaf)) + 0.5 * repr(leaf).count("-") + (leaf == 1))
            elif leaf.dim() == 1:
                result = result + place * leaf.unsqueeze(-1)
            elif leaf.shape[0] == 13:
                result = result + place * leaf.sum()
            elif leaf.shape[0] == 11:
                result = result + place * leaf.sum(0).unsqueeze(-1)
            else:
                result = result + place * leaf
        return {"result": result, "same": tree, "kind": repr(spec.children[0].type)}


@QUICK
@hypothesis.given(
    forms=st.lists(st.tuples(NESTED, SCALARS, st.booleans()), min_size=1, max_size=3),
    order=st.lists(st.tuples(st.integers(0, 2), st.sampled_from([2, 4, 4, 6, 3])), min_size=6, max_size=16),
)
def test_any_nesting_of_arguments_equals_eager(device, forms, order):
    module = Reduces().eval()
    model = sg.wrap(module, capture_sizes=[4, 6], progress=False)
    with torch.no_grad():
        for which, size in order:
            form, option, by_keyword = forms[which % len(forms)]
            x, tree = torch.randn(size, WIDTH, device=device), filled(form, size, device)
            for _ in range(2):
                actual = model(tree=tree, x=x, option=option) if by_keyword else model(x, tree, option=option)
                same(actual, module(x, tree, option=option))
    assert model.graph_stats.replays + sum(model.graph_stats.eager.values()) == 2 * len(order)


@QUICK
@hypothesis.given(tree=NESTED)
def test_flattening_and_putting_together_gives_the_same_back(tree):
    leaves, spec = flatten(tree)
    again = spec.unflatten(leaves)
    assert repr(again) == repr(tree)
    assert flatten(again)[1] == spec
    assert hash(flatten(again)[1]) == hash(spec)
    assert len(spec.names("x")) == len(leaves) == len(set(spec.names("x")))
