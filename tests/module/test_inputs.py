"""Arguments of any nesting and memory layout get into a graph."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, Batch, check_sizes, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    y: torch.Tensor
    scale: float = 1.0


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


def _nested(x):
    return torch.nested.nested_tensor([x[:2], x[1:]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("forward", "make", "told"),
    [
        (lambda m, x: x * 2, _nested, {sg.Reason.OPAQUE_ARGUMENT: "args.0 is a nested tensor"}),
        (lambda m, x: _nested(x), torch.clone, {sg.Reason.UNSUPPORTED_OUTPUT: "a nested tensor"}),
    ],
    ids=["passed", "returned"],
)
@pytest.mark.parametrize("exact", [False, True])
def test_nested_tensors_have_no_sizes_and_run_eagerly(device, forward, make, told, exact):
    model = graphed(device, forward, exact_shapes=exact)
    for _ in range(3):
        x = make(rows(4, device))
        for found, wanted in zip(model(x).unbind(), forward(None, x).unbind(), strict=True):
            assert torch.equal(found, wanted)
    assert model.graph_stats.details == told


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


@pytest.mark.parametrize(("channels", "pixels"), [(3, 5), (1, 5), (3, 1)])
def test_the_forward_sees_each_images_memory_format(device, channels, pixels):
    """Contiguous and channels_last in turn; with one channel or one pixel only the strides tell them apart."""
    seen = set()

    class Format(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(channels, 4, 1)

        def forward(self, x):
            seen.add(x.stride())
            return self.conv(x), x + 1

    module = Format().to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for memory_format in (torch.contiguous_format, torch.channels_last) * 4:
        x = torch.empty(4, channels, pixels, pixels, device=device, memory_format=memory_format).normal_()
        actual, expected = model(x), module(x)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)  # convolutions use TF32
        assert [leaf.stride() for leaf in actual] == [leaf.stride() for leaf in expected]
    assert len(seen) == 2
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 4


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


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_eager_with_a_reason(device):
    class Adds(nn.Module):
        def forward(self, x, scales=None):
            return x if scales is None else x + scales.dequantize()

    if device.type != "cpu":
        pytest.skip("torch quantizes on the CPU")
    model = sg.wrap(Adds().eval(), capture_sizes=[3], progress=False)
    scales = torch.quantize_per_tensor(torch.ones(WIDTH), 0.5, 0, torch.quint8)
    for _ in range(3):
        x = rows(3, device)
        assert torch.equal(model(x, scales), x + 1)  # it ended the process
    assert reasons(model) == {"opaque_argument": 3}


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
    model = graphed(device, lambda m, x: x @ m.weight, capture_sizes=[WIDTH, 9])
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
    assert model.graph_stats.captures == 1
