"""Every call changes its caller's objects, and returns them, exactly as eager does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from simplegraph.base.nested import flatten
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")

SIZES = (4, 4, 4, 4, 3, 3, 8, 8, 5)


@dataclasses.dataclass
class Step:
    hidden: Tensor
    total: Any = None


@dataclasses.dataclass
class Slotted:
    __slots__ = ("hidden", "total")
    hidden: Tensor
    total: Any


def sets_key(m, x, extra):
    extra["total"] = x * 2
    return x + 1


def changes_nested_key(m, x, extra):
    extra["inner"]["total"] = x * 2
    return x + 1


def appends(m, x, results):
    results.append(x * 2)
    return x + 1


def sets_item(m, items):
    items[0] = items[0] * 2
    return items[0] + 1


def sorts(m, x, numbers):
    numbers.sort()
    return x + 1


def pops(m, batch):
    return batch.pop("x") + 1


def sets_field(m, step):
    step.total = step.hidden * 2
    return step.hidden + 1


def replaces_container(m, x, extra):
    extra["inner"] = dict(extra["inner"])
    return x + 1


def sets_attribute(m, x):
    x.note = x * 2
    return x + 1


EFFECTS: dict[str, tuple[Any, Callable[[Tensor], tuple[Any, ...]]]] = {
    "a key set": (sets_key, lambda x: (x, {})),
    "a key set below": (changes_nested_key, lambda x: (x, {"inner": {}})),
    "an item appended": (appends, lambda x: (x, [])),
    "an item set": (sets_item, lambda x: ([x],)),
    "numbers sorted": (sorts, lambda x: (x, [2, 1])),
    "a key popped": (pops, lambda x: ({"x": x, "y": 1},)),
    "a field set": (sets_field, lambda x: (Step(x),)),
    "a slot set": (sets_field, lambda x: (Slotted(x, None),)),
    "a container replaced": (replaces_container, lambda x: (x, {"inner": {"k": 1}})),
    "an attribute of a tensor": (sets_attribute, lambda x: (x,)),
    "transposed in place": (lambda m, x: (x.t_(), x * 2)[1], lambda x: (x,)),
    "unsqueezed in place": (lambda m, x: (x.unsqueeze_(1), x * 2)[1], lambda x: (x,)),
    "resized": (lambda m, x: (x.resize_(2, WIDTH), x * 2)[1], lambda x: (x,)),
    "data set": (lambda m, x: (setattr(x, "data", x * 3), x * 2)[1], lambda x: (x,)),
    "set to a weight": (lambda m, x: (x.set_(m.weight), x * 2)[1], lambda x: (x,)),
}


@pytest.mark.parametrize("upfront", [False, True], ids=["lazy", "upfront"])
@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_forward_does_to_its_arguments_it_does_at_every_call(
    device: torch.device, name: str, upfront: bool
) -> None:
    function, make = EFFECTS[name]
    model = graphed(device, function)
    eager = sg.unwrap(model)
    if upfront:
        model.capture_graphs(*make(rows(4, device)))
    for size in SIZES:
        x = rows(size, device)
        own, twins = make(x), make(x.clone())
        close(model(*own), eager(*twins))
        (leaves, spec), (expected, expected_spec) = flatten(own), flatten(twins)
        assert spec == expected_spec
        for leaf, twin in zip(leaves, expected, strict=True):
            if isinstance(twin, Tensor):
                close(leaf, twin)
            else:
                assert leaf == twin
        assert hasattr(own[0], "note") == hasattr(twins[0], "note")
    assert model.graph_stats.replays == 0
    assert reasons(model)["changed_arguments"] >= len(SIZES) - 1


def test_capturing_all_sizes_of_a_forward_that_reshapes_its_argument_says_so(device: torch.device) -> None:
    def transpose(m: Any, x: Tensor) -> Tensor:
        y = x * torch.ones(WIDTH, device=x.device)  # takes no other width
        x.t_()
        return y

    model = graphed(device, transpose)
    summary = model.capture_graphs(rows(4, device))
    assert (summary.captured, len(summary.failed)) == (0, 2)
    assert all("another shape or memory" in str(error) for error in summary.failed.values())
    x = rows(4, device)
    close(model(x.clone()), x)


def test_an_argument_that_is_changed_at_some_sizes_only_is_changed_there(device: torch.device) -> None:
    def forward(m, x, extra):
        if len(x) > 4:
            extra["large"] = x * 2
        return x + 1

    model = graphed(device, forward)
    for size in (4, 4, 4, 3, 8, 8, 8, 5, 6, 4):
        x, extra = rows(size, device), {}
        close(model(x, extra), x + 1)
        assert list(extra) == (["large"] if size > 4 else [])
        if extra:
            close(extra["large"], x * 2)


def test_arguments_that_stay_as_they_were_are_no_reason(device: torch.device) -> None:
    def forward(m, x, extra, **more):
        more["mine"] = {**extra, "total": x * 2}  # a dict of the forward's own
        return more["mine"]["total"] + 1

    model = graphed(device, forward)
    for size in SIZES:
        x = rows(size, device)
        close(model(x, {"k": [1]}, other=2), x * 2 + 1)
    assert model.graph_stats.replays >= 4


# Outputs that are inputs, or lie in them.

RETURNED: dict[str, Callable[..., Any]] = {
    "the input": lambda m, x: x,
    "the input, written": lambda m, x: x.mul_(2),
    "the input and more": lambda m, x: (x * 2, {"x": x}),
    "the input twice": lambda m, x: (x, x * 2, x),
    "a view of the input": lambda m, x: (x[:, 1:], x * 2),
    "views of the input": lambda m, x: [x.t(), x.view(-1), x.unsqueeze(1)],
    "another object of the input's memory": lambda m, x: (x.detach(), x * 2),
    "an output twice": lambda m, x: (lambda y: (y, y, [y]))(x * 2),
    "an output and a view of it": lambda m, x: (lambda y: (y, y[:, 1:], y.t()))(x * 2),
    "parts of one output": lambda m, x: (x @ m.weight).chunk(3, dim=-1),
    "overlapping parts": lambda m, x: (lambda y: (y[:, :4], y[:, 2:]))(x * 2),
    "an output expanded": lambda m, x: (x.sum(-1, keepdim=True).expand(-1, 4), x * 2),
    "a weight and a view of it": lambda m, x: (x * 2, m.weight, m.weight[1:]),
}


OVERLAPPING = ("an output and a view of it", "overlapping parts")


def sharing(outputs: list[Any], inputs: list[Any]) -> list[Any]:
    """Say which tensors are one, which share memory, and where in it they lie."""
    tensors = [leaf for leaf in (*outputs, *inputs) if isinstance(leaf, Tensor)]
    pairs = [(one, other) for one in tensors for other in tensors]
    same = [one is other for one, other in pairs]
    offsets = [
        one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.data_ptr() - other.data_ptr()
        for one, other in pairs
    ]
    return [same, offsets]


@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("name", RETURNED)
def test_outputs_share_memory_as_eagers_do(device: torch.device, name: str, outputs: str) -> None:
    model = graphed(device, RETURNED[name], outputs=outputs)
    eager = sg.unwrap(model)
    for size in SIZES:
        x = rows(size, device)
        twin = x.clone()
        actual, expected = flatten(model(x))[0], flatten(eager(twin))[0]
        for one, other in zip(actual, expected, strict=True):
            close(one, other)
        # Static outputs of one memory have no storage in common, and what never meets may be cloned apart.
        if name != "parts of one output" and (outputs == "clone" or name not in OVERLAPPING):
            shared, eagers = sharing(actual, [x, model.weight]), sharing(expected, [twin, model.weight])
            assert shared[0] == eagers[0]
            if size in (4, 8):  # rows of the padding lie between the others
                assert shared[1] == eagers[1]
            assert [bool(offset is False) for offset in shared[1]] == [offset is False for offset in eagers[1]]
        if outputs == "clone":
            actual[0].fill_(7.0)
            expected[0].fill_(7.0)
            for one, other in zip([*actual, x], [*expected, twin], strict=True):
                close(one, other)
            model.weight.copy_(torch.randn(WIDTH, WIDTH, device=device))
    assert model.graph_stats.replays >= 3


def test_an_input_with_gaps_is_copied_where_eager_copies_it(device: torch.device) -> None:
    model = graphed(device, lambda m, x: (x.contiguous(), x * 2))
    for turn in range(12):
        size = (4, 4, 3)[turn % 3]
        x = rows(size, device) if turn % 2 else rows(size, device, 2 * WIDTH)[:, ::2]
        first, second = model(x)
        assert (first is x) == x.is_contiguous()
        assert first.is_contiguous()
        close(first, x)
        close(second, x * 2)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 6
    assert "aliased" not in reasons(model)


def test_a_view_of_an_input_padded_in_an_inner_dimension_is_eagers(device: torch.device) -> None:
    model = graphed(device, lambda m, x: (x[1:], x * 2), batch_dims={"args.0": 1})
    for size in SIZES:
        x = torch.randn(WIDTH, size, device=device)
        view, other = model(x)
        assert view.data_ptr() == x[1:].data_ptr()
        close(view, x[1:])
        close(other, x * 2)
    assert model.graph_stats.replays >= 1
    assert reasons(model)["aliased"] >= 1


def test_memory_seen_as_two_dtypes_is_shared_as_eagers(device: torch.device) -> None:
    output = graphed(device, lambda m, x: (lambda y: (y, y.view(torch.int32)))(x * 2))
    view = graphed(device, lambda m, x: (x.view(torch.int32), x * 2))
    for _ in range(5):
        x = rows(4, device)
        one, other = output(x)
        assert one.data_ptr() == other.data_ptr()
        assert view(x)[0].data_ptr() == x.data_ptr()
    assert reasons(output)["aliased"] >= 2
    assert reasons(view)["aliased"] >= 2


def test_a_container_that_was_passed_is_returned_itself(device: torch.device) -> None:
    model = graphed(device, lambda m, batch: batch)
    nested = graphed(device, lambda m, x, caches: (x * 2, caches))
    for _ in range(5):
        batch, caches = {"x": rows(4, device)}, [rows(4, device)]
        assert model(batch) is batch
        assert nested(batch["x"], caches)[1] is caches
    assert reasons(model)["unsupported_output"] >= 4


def test_a_static_input_returned_is_that_static_input(device: torch.device) -> None:
    model = graphed(device, lambda m, x: (x, x * 2))
    model.capture_graphs(rows(4, device))
    static = model.static_inputs(4)["args.0"]
    for _ in range(3):
        static.copy_(rows(4, device))
        returned, doubled = model(static)
        assert returned is static
        close(doubled, static * 2)


# Outputs that the forward makes of Python data.


@pytest.mark.parametrize("upfront", [False, True], ids=["lazy", "upfront"])
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_an_output_of_python_data_is_a_new_one_at_every_call(device: torch.device, outputs: str, upfront: bool) -> None:
    def forward(m, x):
        loss = torch.tensor(3.0)
        return {"y": x * 2, "loss": loss, "both": [loss, loss.view(1)], "sizes": [1, [2]], "names": {"a": "b"}}

    model = graphed(device, forward, outputs=outputs)
    if upfront:
        model.capture_graphs(rows(4, device))
    kept = []
    for size in SIZES:
        x = rows(size, device)
        result = model(x)
        close(result["y"], x * 2)
        assert (result["loss"].item(), result["sizes"], result["names"]) == (3.0, [1, [2]], {"a": "b"})
        assert result["both"][0] is result["loss"]
        kept.append(result)
        result["loss"].fill_(len(kept))
        assert result["both"][1].item() == len(kept)
        result["sizes"][1].append(3)
        result["names"]["c"] = "d"
    assert [result["loss"].item() for result in kept] == [*range(1, len(SIZES) + 1)]
    assert model.graph_stats.replays >= 4


def test_a_tensor_that_the_module_holds_is_returned_itself(device: torch.device) -> None:
    shared = torch.tensor(5.0)

    def forward(m, x):
        if not hasattr(m, "cached"):
            m.cached = torch.tensor(3.0)
        return x * 2, m.cached, shared, m.weight

    model = graphed(device, forward)
    for size in SIZES:
        _, cached, same, weight = model(rows(size, device))
        assert cached is model.cached
        assert same is shared
        assert weight is model.weight
    assert model.graph_stats.replays >= 4
