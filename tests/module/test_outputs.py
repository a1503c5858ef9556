"""Outputs of any nesting are cut to the real rows and are the caller's own."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, Batch, Opaque, check_sizes, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    aux: list[torch.Tensor]
    cache: object = None


OUTPUTS = {
    "tensor": lambda m, x: x @ m.weight,
    "tuple": lambda m, x: (x + 1, x * 2),
    "list": lambda m, x: [x + 1, x * 2],
    "one in a tuple": lambda m, x: (x + 1,),
    "dict": lambda m, x: {"b": x + 1, "a": x * 2},
    "named tuple": lambda m, x: Batch(x + 1, x * 2),
    "torch's named tuple": lambda m, x: x.max(-1),
    "dataclass": lambda m, x: Result(x + 1, [x * 2, x * 3]),
    "hidden and auxiliary states": lambda m, x: (x @ m.weight, [x + 1, x + 2]),
    "deep": lambda m, x: {"a": [x + 1, (x, {"c": x * 2})], "n": None, "s": "text", "k": 3},
    "none": lambda m, x: None,
    "none inside": lambda m, x: (x + 1, None),
    "empty": lambda m, x: (x + 1, [], {}),
    "batch last": lambda m, x: x.t() * 2,
    "batch in the middle": lambda m, x: (x * 2).unsqueeze(0),
    "two rows for each": lambda m, x: x.repeat_interleave(2, 0),
    "flattened": lambda m, x: (x * 2).flatten(),
    "one value for each row": lambda m, x: x.sum(-1),
    "no rows": lambda m, x: m.weight * 2,
    "rows and none": lambda m, x: (x * 2, m.weight.sum()),
    "a parameter": lambda m, x: (x * 2, m.weight),
    "a view of a parameter": lambda m, x: (x * 2, m.weight[0]),
    "the input": lambda m, x: x,
    "a view of the input": lambda m, x: (x[:, 1:], x.t(), x),
    "the same tensor twice": lambda m, x: (lambda y: (y, y, y[:, 0]))(x * 2),
    "expanded": lambda m, x: x.sum(-1, keepdim=True).expand(-1, 4),
    "booleans and integers": lambda m, x: (x > 0, x.argmax(-1)),
    "complex": lambda m, x: torch.complex(x, x).conj(),
}


@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("form", OUTPUTS)
def test_outputs_of_any_nesting_are_cut_to_the_real_rows(device, form, outputs):
    model = graphed(device, OUTPUTS[form], outputs=outputs)
    eager = sg.unwrap(model)
    for size in (4, 4, 4, 8, 8, 8, 3, 3, 5, 1, 6, 7):
        x = rows(size, device)
        actual, expected = model(x), eager(x)
        assert type(actual) is type(expected)
        if isinstance(expected, Result):
            actual, expected = dataclasses.asdict(actual), dataclasses.asdict(expected)
        if expected is not None:
            assert_same(actual, expected)
    assert model.graph_stats.replays >= 8


def assert_same(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        close(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: (x * 2, x.shape[0]),
        lambda m, x: (x * 2, f"{len(x)} rows"),
        lambda m, x: torch.cat([x, x[:1]]),
        lambda m, x: x @ x.t() if len(x) < 6 else (x @ x.t()).flatten(),
        lambda m, x: [x[i] for i in range(len(x))],
        lambda m, x: x[:5] * 2,
        lambda m, x: x[: len(x) // 2] * 2,
    ],
    ids=["its batch size", "text", "one more row", "another rank", "a list of rows", "at most five rows", "half"],
)
def test_an_output_that_does_not_follow_the_batch_is_never_cut_wrong(device, function):
    model = graphed(device, function, capture_sizes=[2, 4, 8])
    eager = sg.unwrap(model)
    for size in (4, 4, 4, 8, 8, 8, 3, 3, 5, 2, 2, 2, 1, 3, 7, 4, 8):
        x = rows(size, device)
        assert_same(model(x), eager(x))
    assert model.graph_stats.replays > 0


def test_an_output_of_batch_by_batch_is_cut_in_both_dimensions(device):
    model = graphed(device, lambda m, x: x @ x.t())
    check_sizes(model, lambda size: ((rows(size, device),), {}), replays=6)


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda m, x: (row for row in [x * 2]), "generator"),
        (lambda m, x: Opaque(x * 2), "Opaque"),
        (lambda m, x: {"k": {x.shape}}, "set"),
        (lambda m, x: x.to_sparse(), "Tensor"),
    ],
    ids=["generator", "object", "set", "sparse"],
)
def test_an_output_that_a_replay_cannot_return_is_eager_with_a_reason(device, function, what, caplog):
    model = graphed(device, function, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(4):
        output = model(x)
    assert reasons(model)["unsupported_output"] >= 2
    assert model.graph_stats.replays == 0
    assert what in caplog.text
    if what == "generator":
        close(next(output), x * 2)
    if what == "Opaque":
        close(output.value, x * 2)


def test_embeddings_in_place_of_ids_have_a_graph_of_their_own(device):
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, WIDTH)

        def forward(self, input_ids=None, inputs_embeds=None, intermediate_tensors=None):
            if intermediate_tensors is not None:
                return intermediate_tensors["hidden"] + intermediate_tensors["residual"]
            return torch.relu(self.embed(input_ids) if inputs_embeds is None else inputs_embeds)

    model = sg.wrap(Decoder().to(device).eval(), capture_sizes=[4, 8])
    eager = sg.unwrap(model)
    for size in (4, 4, 4, 8, 8, 3, 3, 6, 6, 6):
        ids, hidden = torch.randint(10, (size,), device=device), rows(size, device)
        close(model(ids), eager(ids))
        close(model(input_ids=None, inputs_embeds=hidden), torch.relu(hidden))
        close(model(inputs_embeds=hidden), torch.relu(hidden))
        stage = {"hidden": hidden, "residual": hidden * 2}
        close(model(intermediate_tensors=stage), hidden * 3)
    assert len(model.graph_stats.graphs) == 6
    assert model.graph_stats.replays > 20


# How long outputs live.


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x @ m.weight,
        lambda m, x: (x @ m.weight, m.weight * 2),
        lambda m, x: (x @ m.weight, x, m.weight * 2),
    ],
    ids=["one", "several", "an input among them"],
)
def test_cloned_outputs_never_change_after_they_were_returned(forward, device):
    model = graphed(device, forward)
    kept = []
    for size in (4, 4, 4, 3, 4, 8, 8, 8, 2, 4, 8):
        output = model(rows(size, device))
        kept.append((output, copy.deepcopy(output)))
    for output, before in kept:
        torch.testing.assert_close(output, before, rtol=0, atol=0)
    assert model.graph_stats.replays > 0


def test_writing_to_a_cloned_output_disturbs_no_later_call(device):
    model = graphed(device, lambda m, x: (x @ m.weight, x * 1))
    for size in (4, 4, 4, 3, 4, 3, 4):
        x = rows(size, device)
        first, second = model(x)
        close(first, x @ model.weight)
        close(second, x)
        first.fill_(float("nan"))
        second.fill_(float("nan"))
    assert model.graph_stats.replays > 0


def test_static_outputs_are_the_same_memory_at_every_replay(device):
    model = graphed(device, lambda m, x: x @ m.weight, outputs="static", capture_sizes=[4])
    for _ in range(3):
        first = model(rows(4, device))
    x = rows(4, device)
    second = model(x)
    assert first.data_ptr() == second.data_ptr()
    close(first, x @ model.weight)


def test_a_static_output_may_be_the_next_input(device):
    model = graphed(device, lambda m, x: torch.tanh(x @ m.weight), outputs="static", capture_sizes=[4])
    eager = sg.unwrap(model)
    x = expected = rows(4, device)
    for _ in range(8):
        x, expected = model(x), eager(expected)
        close(x, expected)
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_outputs_that_alias_inputs_may_be_the_next_inputs_in_another_order(device, outputs):
    model = graphed(device, lambda m, x, y: (y, x, x - 2 * y), outputs=outputs, capture_sizes=[4])
    x, y = rows(4, device), rows(4, device)
    a, b = x.clone(), y.clone()
    for _ in range(7):
        a, b, last = model(a, b)
        x, y, expected = y, x, x - 2 * y
        close(last.clone(), expected)
        close(a.clone(), x)
        close(b.clone(), y)
    assert model.graph_stats.replays > 0


@pytest.mark.usefixtures("no_grad")
def test_an_expanded_static_output_is_handed_out(device: torch.device) -> None:
    model = graphed(device, lambda m, x: torch.tanh(x)[:, :1].expand(-1, 5), capture_sizes=[4], outputs="static")
    for _ in range(5):
        x = torch.randn(4, WIDTH, device=device)
        close(model(x), torch.tanh(x)[:, :1].expand(-1, 5))
    assert model.graph_stats.replays >= 2
