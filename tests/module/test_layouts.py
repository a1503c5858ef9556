"""How arguments lie in memory and what they are: whatever a forward can ask of that counts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, check_sizes, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")

LAYOUTS = {
    "dense": lambda size, device: rows(size, device),
    "transposed": lambda size, device: rows(WIDTH, device, size).t(),
    "every other column": lambda size, device: rows(size, device, 2 * WIDTH)[:, ::2],
    "columns of a matrix": lambda size, device: rows(size, device, 2 * WIDTH)[:, WIDTH:],
    "the last token": lambda size, device: rows(size, device, 3, WIDTH)[:, -1],
    "transposed columns": lambda size, device: rows(2 * WIDTH, device, size).t()[:, ::2],
    "expanded rows": lambda size, device: rows(1, device).expand(size, WIDTH),
    "expanded columns": lambda size, device: rows(size, device, 1).expand(size, WIDTH),
}


def flatten_and_write(m, x):
    flat = x.flatten()  # the argument itself, if it has no gaps
    if flat.data_ptr() == x.data_ptr():
        flat.add_(1)
    return x * 2


# What a forward can do that depends on the layout of its argument alone.
ASKS = {
    "is_contiguous": lambda m, x: x * 2 if x.is_contiguous() else x * 3,
    "the larger stride": lambda m, x: x * 2 if x.stride(0) < x.stride(1) else x * 3,
    "a stride of 0": lambda m, x: x * 2 if 0 in x.stride() else x * 3,
    "like it": lambda m, x: torch.empty_like(x).copy_(x),
    "arithmetic": lambda m, x: x + 1,
    "flatten and write": flatten_and_write,
}


def twice(make, *args):
    """Make the same thing two times, random numbers included."""
    seed = int(torch.randint(1 << 30, ()))
    for _ in range(2):
        torch.manual_seed(seed)
        yield make(*args)


@pytest.mark.proofs  # a static input is never expanded
@pytest.mark.parametrize("asks", ASKS)
@pytest.mark.parametrize("later", [name for name in LAYOUTS if name != "dense"])
def test_a_layout_that_the_forward_can_see_is_never_another_ones_graph(device, later, asks):
    model = graphed(device, ASKS[asks], capture_sizes=[4])
    eager = sg.unwrap(model)
    for name in ("dense", later, "dense", later):
        for _ in range(4):
            mine, other = twice(LAYOUTS[name], 4, device)
            actual, expected = model(mine), eager(other)
            close(actual, expected)
            close(mine, other)  # written or not
            assert actual.stride() == expected.stride()
    assert model.graph_stats.replays >= 4


@pytest.mark.parametrize(
    ("one", "other"), [*itertools.pairwise([*LAYOUTS, "dense", "the last token", "expanded rows"])]
)
def test_each_layout_is_served_at_padded_sizes_too(device, one, other):
    model = graphed(device, lambda m, x: x @ m.weight + 1, capture_sizes=[4, 8])
    for _ in range(2):
        for name in (one, other):
            make = lambda size, name=name: ((LAYOUTS[name](size, device),), {})  # noqa: E731
            check_sizes(model, make, (4, 4, 4, 8, 8, 8, 3, 5, 7))
            check_sizes(model, make, (3, 5, 7, 4), replays=4)
    kinds = 1 if one == other or {one, other} == {"columns of a matrix", "the last token"} else 2
    assert model.graph_stats.captures == 2 * kinds


def test_one_row_of_a_layout_is_served_by_that_layouts_graphs(device):
    """Strides of one row mean nothing, and rows of more than one come from the same code."""
    for name in ("the last token", "transposed", "every other column"):
        model = graphed(device, lambda m, x: x @ m.weight + 1, capture_sizes=[1, 4], capture="upfront")
        model.capture_graphs(LAYOUTS[name](4, device))
        check_sizes(model, lambda size, name=name: ((LAYOUTS[name](size, device),), {}), (4, 1, 4, 1, 3, 1))
        assert model.graph_stats.captures == 2
        assert "not_captured_upfront" not in reasons(model)


def test_gaps_of_another_size_need_no_other_graph(device):
    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[4])
    for tokens in (3, 3, 3, 5, 9, 17, 2, 3):
        x = rows(4, device, tokens, WIDTH)[:, -1]
        close(model(x), x @ model.weight)
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays >= 5


def test_what_eager_refuses_no_graph_serves(device):
    model = graphed(device, lambda m, x: x.view(-1) * 2, capture_sizes=[4])
    for _ in range(4):
        x = rows(4, device)
        close(model(x), x.view(-1) * 2)
        for name in ("transposed", "columns of a matrix", "the last token"):
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                model(LAYOUTS[name](4, device))
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("dims", [(0, 2, 1, 3), (0, 3, 1, 2), (1, 0, 2, 3)])
def test_permuted_tensors_of_any_rank_are_told_apart(device, dims):
    model = graphed(device, lambda m, x: (x + 1, x.is_contiguous()), exact_shapes=True)
    for permuted in (False, True) * 6:
        x = rows(4, device, 4, 4, 4)
        x = x.permute(dims) if permuted else x
        actual, contiguous = model(x)
        close(actual, x + 1)
        assert (actual.stride(), contiguous) == ((x + 1).stride(), x.is_contiguous())
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 6


# Images: kernels go by their strides even where one channel or one pixel makes these mean nothing.
IMAGES = {
    "dense": lambda size, device: rows(size, device, 3, 4, 4),
    "channels last": lambda size, device: rows(size, device, 3, 4, 4).to(memory_format=torch.channels_last),
    "one channel": lambda size, device: rows(size, device, 1, 4, 4),
    "one channel, last": lambda size, device: rows(size, device, 1, 4, 4).to(memory_format=torch.channels_last),
    "one pixel": lambda size, device: rows(size, device, 3, 1, 1),
    "one pixel, channels last": lambda size, device: rows(size, device, 3, 1, 1).to(memory_format=torch.channels_last),
    "batch last": lambda size, device: rows(3, device, 4, 4, size).permute(3, 0, 1, 2),
    "crop": lambda size, device: rows(size, device, 3, 8, 8)[:, :, 2:6, 2:6],
    "crop, channels last": lambda size, device: rows(size, device, 3, 8, 8).to(memory_format=torch.channels_last)[
        :, :, 2:6, 2:6
    ],
    "every other channel": lambda size, device: rows(size, device, 6, 4, 4)[:, ::2],
    "expanded channels": lambda size, device: rows(size, device, 1, 4, 4).expand(size, 3, 4, 4),
    "expanded rows": lambda size, device: rows(1, device, 3, 4, 4).expand(size, 3, 4, 4),
    "windows that overlap": lambda size, device: rows(size, device, 3, 7).unfold(2, 4, 1),
    "no channels": lambda size, device: rows(size, device, 0, 4, 4),
}


@pytest.mark.parametrize("exact", [True, False])
def test_outputs_of_images_have_eagers_strides_at_an_exact_size(device, exact):
    settings = {"exact_shapes": True} if exact else {"capture_sizes": [4], "batch_dims": {"args.0": 0}}
    model = graphed(device, lambda m, x: (x + 1, torch.empty_like(x).copy_(x), x * x[:1]), **settings)
    eager = sg.unwrap(model)
    for _ in range(2):
        for make in IMAGES.values():
            for size in (4, 4, 4, 4) if exact else (4, 4, 4, 3, 3, 4):
                x = make(size, device)
                actual, expected = model(x), eager(x)
                close(actual, expected)
                if size == 4:
                    assert [y.stride() for y in actual] == [y.stride() for y in expected]
    assert model.graph_stats.replays >= 4 * len(IMAGES)


def test_a_transposed_input_gives_eagers_bits(device):
    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[4])
    for _ in range(5):
        x = rows(WIDTH, device, 4).t()
        assert torch.equal(model(x), x @ model.weight)
    assert model.graph_stats.replays >= 2


@pytest.mark.proofs
def test_layouts_without_end_make_no_graphs_without_end(device):
    model = graphed(device, lambda m, x: x + 1, exact_shapes=True, max_signatures=4)
    for dims in itertools.permutations(range(4)):
        for _ in range(3):
            x = rows(2, device, 2, 2, 2).permute(dims)
            actual = model(x)
            close(actual, x + 1)
            assert actual.stride() == (x + 1).stride()
    assert model.graph_stats.captures == 4
    assert reasons(model)["too_many_signatures"] == 20 * 3
    report = str(model.graph_report())
    assert "4 are known; args.0 changed from float32[2, 2, 2, 2] by strides" in report


# What they are.


@pytest.mark.parametrize("first", ["plain", "parameter"])
def test_a_parameter_is_told_from_a_tensor(device, first):
    def asks(m, x):
        return x * 2 if isinstance(x, nn.Parameter) else x * 3

    model = graphed(device, asks, capture_sizes=[4])
    kinds = {"plain": lambda x: x, "parameter": lambda x: nn.Parameter(x, requires_grad=False)}
    for name in (first, *kinds, *kinds):
        for size in (4, 4, 4, 3, 3, 4):
            x = kinds[name](rows(size, device))
            close(model(x), asks(None, x))
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 8


def test_a_parameter_that_is_returned_is_the_callers(device):
    model = graphed(device, lambda m, x: (x, x + 1), capture_sizes=[4])
    for _ in range(5):
        x = nn.Parameter(rows(4, device), requires_grad=False)
        same, more = model(x)
        assert same is x
        close(more, x + 1)
    assert model.graph_stats.replays >= 2
