"""How arguments get into a graph and results out of it: nesting, batch dimensions, padding, aliasing."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import NamedTuple

import pytest
import torch
from torch import nn

import simplegraph as sg

WIDTH = 6


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Options:
    scale: float
    negate: bool = False


class Opaque:
    """Compares by identity and may change inside."""

    def __init__(self, value):
        self.value = value


class Colour(enum.Enum):
    RED = 2.0
    BLUE = 3.0


class Function(nn.Module):
    """A module around a function, which gets the module first."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Scaled(nn.Module):
    """A non-tensor argument with a name and a default."""

    def forward(self, x, scale=1):
        return x * scale if isinstance(scale, (bool, int, float, complex)) else x


class Spread(nn.Module):
    """Mixes rows on purpose, so that what stands in padding rows shows."""

    def forward(self, x):
        return x + x.sum(0)


def graphed(device, function, **settings):
    module = Function(function).to(device).eval()
    return sg.wrap(module, **{"capture_sizes": [4, 8], "progress": False, **settings})


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def rows(count, device, *shape):
    return torch.randn(count, *(shape or (WIDTH,)), device=device)


def reasons(model):
    return {reason.value: count for reason, count in model.graph_stats.eager.items()}


def check_sizes(model, make, sizes=(4, 4, 4, 8, 8, 8, 3, 3, 5, 1, 6, 4, 7), *, replays=None):
    """Call the model with fresh arguments of every size; compare with eager; return how many calls replayed."""
    eager = sg.unwrap(model)
    before = model.graph_stats.replays
    for size in sizes:
        args, kwargs = make(size)
        close(model(*args, **kwargs), eager(*args, **kwargs))
    served = model.graph_stats.replays - before
    if replays is not None:
        assert served >= replays, reasons(model)
    return served


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# Nested arguments.

NESTED = {
    "positional": (lambda m, x, y: x @ m.weight - y, lambda x, y: ((x, y), {})),
    "keyword": (lambda m, x, y: x @ m.weight - y, lambda x, y: ((), {"y": y, "x": x})),
    "mixed": (lambda m, x, *, y: x - y, lambda x, y: ((x,), {"y": y})),
    "list": (lambda m, pair: pair[0] - pair[1], lambda x, y: (([x, y],), {})),
    "tuple": (lambda m, pair: pair[0] - pair[1], lambda x, y: (((x, y),), {})),
    "dict": (lambda m, pair: pair["x"] - pair["y"], lambda x, y: (({"y": y, "x": x},), {})),
    "ordered dict": (
        lambda m, pair: pair["x"] - pair["y"],
        lambda x, y: ((collections.OrderedDict(x=x, y=y),), {}),
    ),
    "named tuple": (lambda m, pair: pair.x - pair.y, lambda x, y: ((Batch(x, y),), {})),
    "dataclass": (lambda m, p: (p.x - p.y) * p.scale, lambda x, y: ((Inputs(x, y, 2.0),), {})),
    "deep": (
        lambda m, deep: deep["a"][0].x + deep["a"][1]["b"] * deep["c"],
        lambda x, y: (({"a": [Batch(x, y), {"b": y}], "c": 3},), {}),
    ),
    "empty containers": (lambda m, x, e, f, y: x - y, lambda x, y: ((x, [], {}), {"y": y})),
    "none": (lambda m, x, mask, y: x - y if mask is None else x, lambda x, y: ((x, None, y), {})),
    "nested none": (lambda m, x, o: x - o["y"], lambda x, y: ((x, {"mask": None, "y": y}), {})),
}


@pytest.mark.parametrize("form", NESTED)
def test_arguments_of_any_nesting_are_replayed_and_padded(device, form):
    function, pack = NESTED[form]
    model = graphed(device, function)
    check_sizes(model, lambda size: pack(rows(size, device), rows(size, device)), replays=8)


def test_positional_and_keyword_calls_share_one_graph(device):
    class Difference(nn.Module):
        def forward(self, x, y, scale=1.0):
            return (x - y) * scale

    model = sg.wrap(Difference().eval(), capture_sizes=[4])
    for _ in range(3):
        x, y = rows(4, device), rows(4, device)
        close(model(x, y), x - y)
        close(model(x, y=y), x - y)
        close(model(y=y, x=x), x - y)
        close(model(y=y, x=x, scale=1.0), x - y)
        close(model(x, y, 1.0), x - y)
        close(model(x, y, 3.0), (x - y) * 3)
    assert model.graph_stats.captures == 2
    assert set(model.static_inputs(4)) == {"x", "y"}


def test_dicts_with_other_keys_are_other_calls(device):
    model = graphed(device, lambda m, d: d["a"] * 2 if "a" in d else d["b"] * 3, capture_sizes=[4])
    for make in (dict, collections.OrderedDict, lambda **items: collections.defaultdict(list, items)):
        for _ in range(3):
            x = rows(4, device)
            close(model(make(a=x)), x * 2)
            close(model(make(b=x)), x * 3)
    assert model.graph_stats.replays > 0


def test_a_list_and_a_tuple_are_told_apart(device):
    model = graphed(device, lambda m, p: p[0] + p[1] if isinstance(p, list) else p[0] - p[1], capture_sizes=[4])
    for _ in range(4):
        x, y = rows(4, device), rows(4, device)
        close(model([x, y]), x + y)
        close(model((x, y)), x - y)
    assert model.graph_stats.replays > 0


def test_a_dataclass_with_attributes_beside_its_fields_arrives_whole(device):
    @dataclasses.dataclass
    class Lazy:
        x: torch.Tensor

        def __post_init__(self):
            self.doubled = self.x * 2

    model = graphed(device, lambda m, lazy: lazy.x + lazy.doubled, capture_sizes=[4])
    for _ in range(5):
        x = rows(4, device)
        close(model(Lazy(x)), x * 3)
    assert "capture_failed" not in reasons(model)


# The batch dimension.


def rope(m, x, positions):
    return x + positions.sum(0).unsqueeze(-1)


def test_mrope_positions_with_the_batch_in_dimension_one_are_inferred(device):
    model = graphed(device, rope)
    check_sizes(model, lambda size: ((rows(size, device), rows(3, device, size)), {}), replays=8)


def test_mrope_positions_are_padded_in_their_own_dimension_when_declared(device):
    model = graphed(device, rope, batch_dims={"args.1": 1})
    check_sizes(model, lambda size: ((rows(size, device), rows(3, device, size)), {}), replays=8)


def test_a_batch_of_three_with_three_position_rows_is_never_guessed_wrong(device):
    class Rope(nn.Module):
        def forward(self, x, positions):
            return x + positions.sum(0).unsqueeze(-1)

    model = sg.wrap(Rope().eval(), capture_sizes=[4, 8])
    make = lambda size: ((rows(size, device), rows(3, device, size)), {})  # noqa: E731
    check_sizes(model, make, (3, 3, 3))
    assert reasons(model) == {"ambiguous_batch_dim": 3}
    assert check_sizes(model, make, (5, 5, 5, 5, 3, 3, 3, 8, 8, 3)) > 4

    declared = sg.wrap(Rope().eval(), capture_sizes=[4, 8], batch_dims={"positions": -1})
    check_sizes(declared, make, (4, 3, 3, 3, 3), replays=2)
    assert "ambiguous_batch_dim" not in reasons(declared)


def test_positions_as_the_first_argument_work_when_declared(device):
    class First(nn.Module):
        def forward(self, positions, x):
            return x + positions.sum(0).unsqueeze(-1)

    model = sg.wrap(First().eval(), capture_sizes=[4, 8], batch_dims={"positions": 1})
    check_sizes(model, lambda size: ((rows(3, device, size), rows(size, device)), {}), replays=8)


def test_a_batch_of_one_among_dimensions_of_one_is_padded_right(device):
    class Masked(nn.Module):
        def forward(self, x, mask):  # (B, W), (1, B, W)
            return x * mask[0]

    model = sg.wrap(Masked().eval(), capture_sizes=[2, 4])
    check_sizes(
        model, lambda size: ((rows(size, device), rows(1, device, size, WIDTH)), {}), (1, 1, 1, 2, 2, 2, 1, 1, 3, 4)
    )


def test_a_tensor_without_a_batch_dimension_may_change_from_call_to_call(device):
    model = graphed(device, lambda m, x, table: x * table, capture_sizes=[4])
    make = lambda size: ((rows(size, device), rows(WIDTH, device, 1)[:, 0]), {})  # noqa: E731
    check_sizes(model, make, (4, 4, 4, 2, 2, 3, 1, 4), replays=6)


def test_a_declared_argument_without_batch_dimension_is_never_padded(device):
    class Lookup(nn.Module):
        def forward(self, x, memory):
            return torch.softmax(x @ memory.T, -1) @ memory

    model = sg.wrap(Lookup().eval(), capture_sizes=[8], batch_dims={"memory": None})
    memory = rows(4, device)
    check_sizes(model, lambda size: ((rows(size, device), memory), {}), (4, 4, 4, 4, 4, 5, 4), replays=2)


def test_a_scalar_tensor_is_an_input_and_not_a_constant(device):
    model = graphed(device, lambda m, x, scale: x * scale, capture_sizes=[4])
    check_sizes(
        model, lambda size: ((rows(size, device), torch.rand((), device=device)), {}), (4, 4, 4, 4, 2), replays=2
    )


def test_a_declared_dimension_that_is_not_there_is_a_clear_error(device):
    class One(nn.Module):
        def forward(self, x):
            return x * 2

    model = sg.wrap(One().eval(), capture_sizes=[4], batch_dims={"x": 2})
    with pytest.raises(sg.InputError, match=r"batch_dims\['x'\] is 2"):
        model(rows(4, device))


@pytest.mark.parametrize("setting", [{"batch_dims": {"positons": 1}}, {"pad_values": {"positons": 1}}])
def test_a_misspelt_argument_name_is_an_error_and_not_ignored(device, setting):
    class One(nn.Module):
        def forward(self, positions):
            return positions * 2

    with pytest.raises(sg.ConfigError, match="positons"):
        sg.wrap(One().eval(), **setting)(rows(4, device))


def test_arguments_that_disagree_on_the_batch_run_eagerly_with_a_reason(device):
    model = graphed(device, lambda m, x, y: x.sum(0) + y.sum(0))
    for size in (4, 4, 4, 8, 8, 8):
        x, y = rows(size, device), rows(size, device)
        close(model(x, y), x.sum(0) + y.sum(0))
    x, y = rows(4, device), rows(3, device)
    close(model(x, y), x.sum(0) + y.sum(0))
    assert reasons(model)["batch_mismatch"] == 1


def test_arguments_that_a_forward_cannot_combine_raise_what_eager_raises(device):
    model = graphed(device, lambda m, x, y: x + y)
    for size in (4, 4, 4):
        model(rows(size, device), rows(size, device))
    with pytest.raises(RuntimeError, match="must match"):
        model(rows(4, device), rows(3, device))
    x, y = rows(4, device), rows(4, device)
    close(model(x, y), x + y)


# Values that are no tensors.


@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0),
        (0, False, 0.0),
        (0.0, -0.0),
        (2, 3),
        ("a", "b", None),
        (2.0, None),
        (Colour.RED, Colour.BLUE),
        (Options(1.0), Options(2.0), Options(1.0, negate=True)),
        (torch.float16, torch.float32),
        (float("inf"), float("-inf")),
        (1j, 1 + 1j),
        (b"a", "a"),
        (slice(0, 2), slice(0, 3)),
    ],
    ids=repr,
)
def test_values_that_are_no_tensors_are_never_confused(device, values):
    """The forward's answer depends on the very value and its type."""
    seen = {}

    def answer(value):
        text = repr(value)
        return float(seen.setdefault(text, len(seen) + 1))

    for value in values:
        answer(value)

    class Valued(nn.Module):
        def forward(self, x, value):
            return x * answer(value)

    model = sg.wrap(Valued().eval(), capture_sizes=[4])
    for _ in range(4):
        for value in values:
            x = rows(4, device)
            assert torch.equal(model(x, value), x * answer(value)), value
            assert torch.equal(model(x, value=value), x * answer(value)), value
    assert model.graph_stats.replays > 3 * len(values)


@pytest.mark.parametrize("captured", [5, None, "text", 0.5, True])
@pytest.mark.parametrize("passed", [5, None, "text", 0.5, True])
def test_another_value_never_replays_the_graph_of_the_captured_one(device, captured, passed):
    class Valued(nn.Module):
        def forward(self, x, value):
            return x + len(repr(value))

    model = sg.wrap(Valued().eval(), capture_sizes=[4])
    x = rows(4, device)
    for _ in range(4):
        model(x, captured)
    assert torch.equal(model(x, passed), x + len(repr(passed)))


def test_a_tensor_in_place_of_a_value_and_back_is_as_in_eager(device):
    model = sg.wrap(Scaled().eval(), capture_sizes=[4])
    x = rows(4, device)
    scale = torch.tensor(3.0, device=device)
    for _ in range(4):
        assert torch.equal(model(x, 2), x * 2)
        assert torch.equal(model(x, scale), x)
        assert torch.equal(model(x, None), x)
        assert torch.equal(model(x), x)


def test_a_value_that_cannot_be_told_apart_is_a_clear_error(device):
    class Unhashable:
        __hash__ = None

    model = sg.wrap(Scaled().eval(), capture_sizes=[4])
    with pytest.raises(sg.InputError, match=r"'scale' is a Unhashable.*trusted_args"):
        model(rows(4, device), Unhashable())
    x = rows(4, device)
    for _ in range(3):
        assert torch.equal(model(x, 2), x * 2)
    assert model.graph_stats.replays == 2


def test_an_object_that_may_change_inside_runs_eagerly_with_a_reason(device):
    class Reads(nn.Module):
        def forward(self, x, box):
            return x * box.value

    model = sg.wrap(Reads().eval(), capture_sizes=[4])
    box = Opaque(1.0)
    for step in range(4):
        box.value = float(step)
        x = rows(4, device)
        assert torch.equal(model(x, box), x * step)
    assert reasons(model) == {"opaque_argument": 4}


def test_a_trusted_object_is_captured_and_another_one_is_another_graph(device):
    class Reads(nn.Module):
        def forward(self, x, box):
            return x * box.value

    model = sg.wrap(Reads().eval(), capture_sizes=[4], trusted_args=["box"])
    boxes = [Opaque(2.0), Opaque(3.0)]
    for _ in range(4):
        for box in boxes:
            x = rows(4, device)
            assert torch.equal(model(x, box), x * box.value)
    assert model.graph_stats.replays == 6


def test_trusted_objects_that_compare_equal_or_not_at_all_are_told_apart_by_identity(device):
    class Same(Opaque):
        __hash__ = None

        def __eq__(self, other):
            return True

    class Refusing(Opaque):
        __hash__ = None

        def __eq__(self, other):
            raise ValueError("the truth value is ambiguous")

    class Reads(nn.Module):
        def forward(self, x, box):
            return x * box.value

    for kind in (Same, Refusing):
        model = sg.wrap(Reads().eval(), capture_sizes=[4], trusted_args=["box"])
        boxes = [kind(2.0), kind(3.0)]
        for _ in range(4):
            for box in boxes:
                x = rows(4, device)
                assert torch.equal(model(x, box), x * box.value)


def test_too_many_different_values_run_eagerly_and_are_right(device):
    model = sg.wrap(Scaled().eval(), capture_sizes=[4], max_signatures=3)
    x = rows(4, device)
    for _ in range(3):
        for scale in range(2, 8):
            assert torch.equal(model(x, scale), x * scale)
    assert reasons(model)["too_many_signatures"] == 9
    assert model.graph_stats.replays == 6


def test_not_a_number_as_an_argument_is_still_captured(device):
    class Filled(nn.Module):
        def forward(self, x, value):
            return torch.nan_to_num(x * value, nan=1.0)

    model = sg.wrap(Filled().eval(), capture_sizes=[4])
    for _ in range(4):
        assert torch.equal(model(rows(4, device), float("nan")), torch.ones(4, WIDTH, device=device))
    assert model.graph_stats.replays > 0


def test_a_changed_dtype_rank_or_trailing_shape_is_another_graph(device):
    model = sg.wrap(Scaled().eval(), capture_sizes=[4])
    makers = [
        lambda: rows(4, device),
        lambda: rows(4, device).double(),
        lambda: torch.randint(9, (4, WIDTH), device=device),
        lambda: rows(4, device, WIDTH + 1),
        lambda: rows(4, device, 2, WIDTH),
        lambda: rows(4, device, 1)[:, 0],
    ]
    for _ in range(3):
        for make in makers:
            x = make()
            assert torch.equal(model(x, 2), x * 2)
    assert len(model.graph_stats.graphs) == len(makers)


# Padding.


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(None, 0.0), ("zero", 0.0), (2.5, 2.5), (-1, -1.0), ("repeat-last", None)],
    ids=["default", "zero", "number", "negative", "repeat-last"],
)
def test_padding_rows_hold_what_the_rule_says_at_every_call(device, rule, expected):
    model = sg.wrap(Spread().eval(), capture_sizes=[4, 8], pad_values={} if rule is None else {"x": rule})
    for size, padded in ((4, 4), (8, 8), (4, 4), (8, 8), (3, 4), (2, 4), (8, 8), (5, 8), (3, 4), (7, 8), (1, 4)):
        x = rows(size, device)
        pad = x[-1:] if expected is None else torch.full((1, WIDTH), expected, device=device)
        close(model(x), x + x.sum(0) + (padded - size) * pad[0])
    assert model.graph_stats.replays >= 5


def test_padding_rows_that_are_kept_hold_the_rows_before(device):
    model = sg.wrap(Spread().eval(), capture_sizes=[4], pad_values={"x": "keep"})
    model.capture_graphs(rows(4, device))
    full, part = rows(4, device), rows(2, device)
    close(model(full), full + full.sum(0))
    close(model(part), part + part.sum(0) + full[2:].sum(0))
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("rule", ["zero", 3.0, "repeat-last"])
def test_a_pad_rule_for_a_nested_argument_covers_what_is_inside(device, rule):
    class Nested(nn.Module):
        def forward(self, states):
            return states["x"] + states["x"].sum(0)

    model = sg.wrap(Nested().eval(), capture_sizes=[4], pad_values={"states": rule}, progress=False)
    model.capture_graphs({"x": rows(4, device)})
    x = rows(3, device)
    pad = {"zero": torch.zeros(WIDTH, device=device), "repeat-last": x[-1]}.get(rule, torch.tensor(3.0, device=device))
    close(model({"x": x}), x + x.sum(0) + pad)
    assert model.graph_stats.replays > 0


def test_padding_of_a_dimension_that_is_not_first_is_right_at_every_size(device):
    class Columns(nn.Module):
        def forward(self, x):  # (WIDTH, B)
            return x + x.sum(1, keepdim=True)

    model = sg.wrap(Columns().eval(), capture_sizes=[4, 8], batch_dims={"x": 1}, pad_values={"x": 2.0})
    for size, padded in ((4, 4), (8, 8), (4, 4), (8, 8), (3, 4), (5, 8), (2, 4), (8, 8), (1, 4), (6, 8), (3, 4)):
        x = rows(WIDTH, device, size)
        close(model(x), x + x.sum(1, keepdim=True) + 2.0 * (padded - size))
    assert model.graph_stats.replays >= 5


def test_each_argument_has_its_own_pad_rule(device):
    class Both(nn.Module):
        def forward(self, x, slots):
            return x + x.sum(0), slots + slots.sum(0)

    model = sg.wrap(Both().eval(), capture_sizes=[8], pad_values={"slots": -1}, progress=False)
    model.capture_graphs(rows(8, device), torch.arange(8, device=device))
    for size in (5, 8, 2, 7):
        x, slots = rows(size, device), torch.randint(50, (size,), device=device)
        first, second = model(x, slots)
        close(first, x + x.sum(0))
        assert torch.equal(second, slots + slots.sum(0) - (8 - size))


def test_token_ids_are_padded_with_a_valid_id(device):
    module = nn.Embedding(10, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4, 8])
    check_sizes(model, lambda size: ((torch.randint(10, (size,), device=device),), {}), replays=8)


# Outputs.


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


def test_cloned_outputs_never_change_after_they_were_returned(device):
    model = graphed(device, lambda m, x: (x @ m.weight, x, m.weight * 2))
    kept = []
    for size in (4, 4, 4, 3, 4, 8, 8, 8, 2, 4, 8):
        x = rows(size, device)
        output = model(x)
        kept.append((output, [leaf.clone() for leaf in output]))
    for output, copies in kept:
        for leaf, copy in zip(output, copies, strict=True):
            assert torch.equal(leaf, copy)


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


# Inputs that are unusual in memory.


STRANGE = {
    "every other column": lambda size, device: rows(size, device, 2 * WIDTH)[:, ::2],
    "transposed": lambda size, device: rows(WIDTH, device, size).t(),
    "expanded rows": lambda size, device: rows(1, device).expand(size, WIDTH),
    "expanded columns": lambda size, device: rows(size, device, 1).expand(size, WIDTH),
    "in the middle of a storage": lambda size, device: rows(size + 5, device)[3 : size + 3],
    "flipped rows": lambda size, device: rows(size, device).flip(0),
    "a parameter": lambda size, device: nn.Parameter(rows(size, device), requires_grad=False),
    "negated view": lambda size, device: torch.complex(rows(size, device), rows(size, device)).conj().imag,
}


@pytest.mark.parametrize("form", STRANGE)
def test_inputs_of_any_memory_layout_give_eagers_answer(device, form):
    model = graphed(device, lambda m, x: x @ m.weight + 1)
    plain = lambda size: ((rows(size, device),), {})  # noqa: E731
    strange = lambda size: ((STRANGE[form](size, device),), {})  # noqa: E731
    for make in (strange, plain, strange):
        check_sizes(model, make, (4, 4, 4, 3, 3, 8, 8, 5))
    assert model.graph_stats.replays > 12


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_channels_last_images_stay_channels_last(device, memory_format):
    module = nn.Conv2d(3, 4, 3, padding=1).to(device, memory_format=memory_format).eval()
    model = sg.wrap(module, capture_sizes=[2, 4])
    for size in (2, 2, 2, 4, 4, 4, 1, 3, 2):
        x = torch.randn(size, 3, 5, 5, device=device).contiguous(memory_format=memory_format)
        actual, expected = model(x), module(x)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)  # convolutions use TF32
        if size > 1:
            assert actual.is_contiguous(memory_format=memory_format) == expected.is_contiguous(
                memory_format=memory_format
            )
    assert model.graph_stats.replays >= 5


def test_one_tensor_for_two_arguments_is_right(device):
    model = graphed(device, lambda m, x, y: x - 3 * y)
    for size in (4, 4, 4, 3, 4):
        x, y = rows(size, device), rows(size, device)
        close(model(x, x), -2 * x)
        close(model(x, y), x - 3 * y)
    assert model.graph_stats.replays > 0


def test_overlapping_views_for_two_arguments_are_right(device):
    model = graphed(device, lambda m, x, y: x - 3 * y, capture_sizes=[4])
    for _ in range(4):
        both = rows(5, device)
        close(model(both[:4], both[1:]), both[:4] - 3 * both[1:])
    assert model.graph_stats.replays > 0


def test_a_sparse_tensor_after_dense_ones_is_eager_with_a_reason(device):
    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        model(x)
    close(model(x.to_sparse()), x @ model.weight)
    assert reasons(model)["opaque_argument"] == 1


def test_a_tensor_subclass_is_eager_with_a_reason(device):
    class Marked(torch.Tensor):
        pass

    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        model(x)
    output = model(x.as_subclass(Marked))
    assert type(output) is Marked
    close(output.as_subclass(torch.Tensor), x @ model.weight)
    assert reasons(model)["opaque_argument"] == 1


def test_a_conjugated_view_of_a_static_input_is_conjugated(device):
    model = graphed(device, lambda m, x: x * 2, capture_sizes=[4], progress=False)
    z = torch.complex(rows(4, device), rows(4, device))
    model.capture_graphs(z)
    static = model.static_inputs(4)["args.0"]
    static.copy_(z)
    close(model(static.conj()), z.conj() * 2)
    assert model.graph_stats.replays > 0


def test_a_transposed_view_of_a_static_input_is_transposed(device):
    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[WIDTH, 9], num_warmups=2)
    check_sizes(model, lambda size: ((rows(size, device),), {}), (9, 9, 9))
    static = model.static_inputs(9)["args.0"]
    for _ in range(4):
        x = rows(9, device)
        static.copy_(x)
        close(model(static[:WIDTH].t()), x[:WIDTH].t() @ model.weight)


def test_inputs_on_another_device_than_the_graphs_raise_what_eager_raises(device):
    if device.type != "cuda":
        pytest.skip("needs two devices")
    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[4])
    for _ in range(3):
        model(rows(4, device))
    with pytest.raises(RuntimeError, match="device"):
        model(torch.randn(4, WIDTH))
    x = rows(4, device)
    close(model(x), x @ model.weight)
    assert reasons(model)["wrong_device"] == 1


# Forwards that write to their inputs.


@pytest.mark.parametrize("sizes", [(4,) * 6, (3,) * 8, (4, 3, 4, 3, 8, 8, 8, 5, 3, 4)])
def test_what_a_forward_writes_to_its_input_reaches_the_caller(device, sizes):
    def step(m, x, counter):
        counter.add_(1)
        return x + counter

    model = graphed(device, step)
    for size in sizes:
        x, counter = rows(size, device), torch.arange(float(size), device=device).unsqueeze(1)
        expected = counter + 1
        close(model(x, counter), x + expected)
        close(counter, expected)
    assert model.graph_stats.replays > 0


def test_an_input_written_and_passed_again_and_again_advances_each_time(device):
    def step(m, x, state):
        state.copy_(torch.tanh(state + x))
        return state * 2

    model = graphed(device, step, capture_sizes=[4])
    state, expected = torch.zeros(4, WIDTH, device=device), torch.zeros(4, WIDTH, device=device)
    for _ in range(8):
        x = rows(4, device)
        expected = torch.tanh(expected + x)
        close(model(x, state), expected * 2)
        close(state, expected)
    assert model.graph_stats.replays >= 5


def test_a_written_input_without_batch_dimension_reaches_the_caller(device):
    def step(m, x, total):
        total.add_(x[0])
        return x * 2

    model = graphed(device, step, capture_sizes=[4])
    total, expected = torch.zeros(WIDTH, device=device), torch.zeros(WIDTH, device=device)
    for _ in range(6):
        x = rows(4, device)
        expected = expected + x[0]
        model(x, total)
        close(total, expected)
    assert model.graph_stats.replays > 0


def test_an_input_that_only_larger_batches_write_to_reaches_the_caller(device):
    def step(m, x):
        if x.shape[0] > 2:
            x.add_(1)
        return x * 2

    model = graphed(device, step, capture_sizes=[2, 4, 8])
    for size in (2, 2, 2, 4, 4, 4, 4, 3, 8, 8, 8, 7):
        x = rows(size, device)
        expected = x + 1 if size > 2 else x.clone()
        close(model(x), expected * 2)
        close(x, expected)
    assert model.graph_stats.replays > 0


def test_a_forward_that_writes_to_one_of_two_aliases_is_as_in_eager(device):
    def step(m, x, y):
        x.add_(1)
        return x + y

    model = graphed(device, step, capture_sizes=[4])
    eager = sg.unwrap(model)
    for turn in range(8):
        shared, expected = rows(4, device), None
        twin = shared.clone()
        args = (lambda t: (t, t)) if turn % 2 else (lambda t: (t, rows(4, device).zero_()))
        expected = eager(*args(twin))
        close(model(*args(shared)), expected)
        close(shared, twin)
    assert model.graph_stats.replays > 0


def test_a_strided_view_written_by_the_forward_is_written_in_place(device):
    model = graphed(device, lambda m, x: x.mul_(2), capture_sizes=[4])
    for _ in range(5):
        whole = rows(4, device, 2 * WIDTH)
        expected = whole.clone()
        expected[:, ::2] *= 2
        close(model(whole[:, ::2]), expected[:, ::2])
        close(whole, expected)


def test_a_cache_passed_by_reference_is_written_where_it_is(device):
    class Step(nn.Module):
        def forward(self, x, slots, cache):
            cache.index_copy_(0, slots, x)
            return cache.sum(0) + x

    model = sg.wrap(Step().eval(), capture_sizes=[4], batch_dims={"cache": "reference"}, progress=False)
    eager = sg.unwrap(model)
    caches = [torch.zeros(16, WIDTH, device=device) for _ in range(2)]
    twins = [cache.clone() for cache in caches]
    for turn in range(10):
        x, slots = rows(4, device), torch.randperm(16, device=device)[:4]
        cache, twin = caches[turn % 2], twins[turn % 2]
        close(model(x, slots, cache), eager(x, slots, twin))
        close(cache, twin)
    assert model.graph_stats.replays >= 5
    assert len(model.graph_stats.graphs) == 2


def test_one_large_batch_does_not_make_every_smaller_call_pad_anew(device):
    module = nn.Linear(6, 6).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4, 16], progress=False, outputs="static")
    with torch.no_grad():
        model.capture_graphs(torch.randn(16, 6, device=device))
        model(torch.randn(16, 6, device=device))
        for _ in range(2):
            x = torch.randn(3, 6, device=device)
            close(model(x), module(x))
        plan = next(plan for plan in model._graph_runner._last.plans.values() if plan.rows == 3)
        assert plan.inputs.dirty == 3
        static = plan.inputs.inputs["input"]
        assert torch.equal(static.part(16, 3, 16), torch.zeros(13, 6, device=device))
