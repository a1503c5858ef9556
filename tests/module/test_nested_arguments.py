"""Random nested arguments: always eager's answer."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.nested import flatten

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

WIDTH = 5
QUICK = hypothesis.settings(
    max_examples=30, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


def same(actual, expected):
    leaves, spec = flatten(actual)
    others, other_spec = flatten(expected)
    assert spec == other_spec
    for one, other in zip(leaves, others, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        else:
            assert one == other


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
