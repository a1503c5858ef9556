"""Eager breaks: a marked function runs between graph segments, at every replay, and the numbers are eager's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import BreakError, CaptureError, ConfigError, StaleGraphError
from simplegraph.manager.stats import GraphCounters

SIZES = [2, 4]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Calls:
    """Counts, so that a test can tell what ran."""

    breaks = 0
    forwards = 0


@sg.eager_break
def doubled(x: Tensor) -> Tensor:
    Calls.breaks += 1
    return x * 2


@sg.eager_break
def double_into(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


class Model(nn.Module):
    """Linear, a break, Linear; `middle` is the break."""

    def __init__(self, middle: Callable[..., Any] = doubled) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        Calls.forwards += 1
        hidden = self.first(x)
        return self.last(self.middle(hidden)) + hidden


def piecewise(module: nn.Module, device: torch.device, **settings: Any) -> Any:
    settings = {"mode": "PIECEWISE", "capture_sizes": SIZES, "progress": False} | settings
    return sg.wrap(module.to(device).eval(), **settings)


def graphs(model: Any) -> list[GraphCounters]:
    return list(model.graph_stats.graphs.values())


def check_equal(model: Any, module: nn.Module, device: torch.device, calls: int = 8, width: int = 4) -> None:
    """Some calls of each size, padded ones too, with garbage left in freed memory between them."""
    for index in range(calls):
        x = torch.randn(1 + index % 4, width, device=device)
        expected = module(x)
        _ = [torch.full((size, 8), float("nan"), device=device) for size in (1, 4, 64, 256)]
        torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
def test_a_break_splits_the_graph_and_the_numbers_are_eagers(device: torch.device, capture: str) -> None:
    module = Model()
    model = piecewise(module, device, capture=capture)
    if capture == "upfront":
        model.capture_graphs(torch.randn(3, 4, device=device))
    check_equal(model, module, device)
    assert [(graph.segments, graph.breaks) for graph in graphs(model)] == [(2, 1), (2, 1)]
    assert model.graph_stats.failures == {}


def test_at_every_replay_the_break_runs_and_the_rest_of_python_does_not(device: torch.device) -> None:
    model = piecewise(Model(), device)
    model.capture_graphs(torch.randn(4, 4, device=device))
    Calls.breaks = Calls.forwards = 0
    for _ in range(5):
        model(torch.randn(4, 4, device=device))
    assert (Calls.breaks, Calls.forwards) == (5, 0)


def test_in_full_mode_a_break_is_part_of_the_one_segment(device: torch.device) -> None:
    module = Model()
    model = piecewise(module, device, mode="FULL")
    check_equal(model, module, device)
    assert {(graph.segments, graph.breaks) for graph in graphs(model)} == {(1, 0)}


def test_outside_a_capture_a_break_is_a_plain_call() -> None:
    assert doubled(torch.ones(1)).item() == 2
    assert doubled.__name__ == "doubled"


def test_marking_twice_does_no_harm() -> None:
    assert sg.eager_break(doubled) is doubled


class Method(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 1.0

    @sg.eager_break
    def attend(self, x: Tensor, *, bias: Tensor) -> Tensor:
        return x * self.scale + bias

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.linear(x), bias=self.linear.bias).relu()


def test_methods_break_and_read_their_object_at_every_replay(device: torch.device) -> None:
    module = Method()
    model = piecewise(module, device)
    check_equal(model, module, device)
    module.scale = 5.0
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 1


# What cannot be marked.


async def later(x: Tensor) -> Tensor:
    return x


def stream(x: Tensor) -> Iterator[Tensor]:
    yield x


class Deferred:
    async def __call__(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (later, "async"),
        (stream, "generator"),
        (functools.partial(later), "async"),
        (Deferred(), "async"),
        (Model, "the class Model"),
        (nn.Linear(1, 1), "break_at"),
        (staticmethod(len), "put @staticmethod above it"),
        (3, "expected a function"),
    ],
)
def test_what_cannot_break_is_refused_when_it_is_marked(target: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sg.eager_break(target)


# Modules of others.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.proj(x).softmax(-1), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attn(x)[0]).relu()


def stack(blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(blocks)])


def test_break_at_breaks_at_the_named_modules(device: torch.device) -> None:
    module = stack()
    reference = copy.deepcopy(module)
    assert sg.break_at(module, "*.attn") == ["0.attn", "1.attn", "2.attn"]
    model = piecewise(module, device)
    check_equal(model, reference.to(device).eval(), device)
    assert graphs(model)[0].breaks == 3
    assert "Attention x 3" in str(model.graph_report())
    assert isinstance(module[0].attn, Attention)
    assert module.state_dict().keys() == reference.state_dict().keys()


def test_break_at_finds_a_shared_module_by_each_of_its_names(device: torch.device) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + 1) * 2

    module = Shared().eval().to(device)
    twin = copy.deepcopy(module)
    assert sg.break_at(module, "second") == ["second"]
    model = piecewise(module, device)
    check_equal(model, twin, device)
    assert graphs(model)[0].breaks == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_keep_their_breaks(device: torch.device, copied: Callable[[Any], Any]) -> None:
    module = stack(1)
    sg.break_at(module, "*.attn")
    twin = copied(module)
    model = piecewise(twin, device)
    check_equal(model, twin, device)
    assert graphs(model)[0].breaks == 1
    torch.testing.assert_close(twin[0].attn.proj.weight, module[0].attn.proj.weight.to(device))
    assert twin[0].attn.proj.weight is not module[0].attn.proj.weight


def test_hooks_of_a_module_that_breaks_run_at_every_replay(device: torch.device) -> None:
    module = stack(1)
    sg.break_at(module, "0.attn")
    seen: list[tuple[int, ...]] = []
    module[0].attn.register_forward_hook(lambda _, args, out: seen.append(tuple(args[0].shape)))
    model = piecewise(module, device)
    model.capture_graphs(torch.randn(4, 4, device=device))
    seen.clear()
    for _ in range(3):
        model(torch.randn(4, 4, device=device))
    assert seen == [(4, 4)] * 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((stack(), "*.atn"), r"'\*\.atn'.*\*\.attn"),
        ((stack(),), "at least one"),
        ((stack(), 3), "at least one"),
        ((3, "*"), "torch.nn.Module"),
    ],
)
def test_break_at_says_what_is_wrong(args: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sg.break_at(*args)


# Operators.

_library = torch.library.Library("sgtest", "FRAGMENT")
_library.define("attend(Tensor x, Tensor(a!) out, float scale) -> ()", tags=[torch.Tag.cudagraph_unsafe])
_library.define("scaled(Tensor x, float scale) -> Tensor")
_library.define("twice(Tensor(a!) x) -> Tensor(a!)", tags=[torch.Tag.cudagraph_unsafe])
for _key in ("CPU", "CUDA"):
    _library.impl("attend", lambda x, out, scale: (out.copy_(x * scale), None)[1], _key)
    _library.impl("scaled", lambda x, scale: x * scale, _key)
    _library.impl("twice", lambda x: x.mul_(2), _key)


def attend(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    torch.ops.sgtest.attend(x, out, 3.0)
    return out


def test_an_operator_tagged_unsafe_breaks_by_itself(device: torch.device) -> None:
    module = Model(attend)
    model = piecewise(module, device)
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 1
    assert "sgtest.attend.default x 1" in str(model.graph_report())
    full = piecewise(module, device, mode="FULL")
    check_equal(full, module, device)
    assert graphs(full)[0].breaks == 0


def test_an_operator_that_returns_its_argument_breaks(device: torch.device) -> None:
    module = Model(torch.ops.sgtest.twice)
    model = piecewise(module, device)
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 1


@pytest.mark.parametrize(("name", "breaks"), [("sgtest::scaled", 1), ("aten::sort", 0)])
def test_an_operator_named_in_the_config_breaks_in_this_wrapper_alone(
    device: torch.device, name: str, breaks: int
) -> None:
    module = Model(lambda x: torch.ops.sgtest.scaled(x, 0.5))
    model = piecewise(module, device, break_ops=[name])
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == breaks


def test_torchs_own_operators_can_break(device: torch.device) -> None:
    module = Model(lambda x: torch.sort(x, dim=-1).values + torch.sort(x, dim=-1, stable=True).values)
    model = piecewise(module, device, break_ops=["aten::sort"])
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 2


@pytest.mark.parametrize("name", ["sgtest::nothing", "nothing::at_all", "aten::sort.nothing"])
def test_an_operator_that_does_not_exist_is_an_error_that_names_it(device: torch.device, name: str) -> None:
    model = piecewise(Model(), device, break_ops=[name])
    with pytest.raises(ConfigError, match=name):
        model.capture_graphs(torch.randn(4, 4, device=device))


def test_an_operators_name_has_a_namespace() -> None:
    with pytest.raises(ConfigError, match="mylib::attention"):
        sg.CudaGraphConfig(break_ops=["sort"])


# What breaks return.


@dataclasses.dataclass
class Pair:
    left: Tensor
    right: Tensor


RESULTS: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x + 1,
    "its argument": lambda x: x,
    "its argument, written": lambda x: x.add_(1),
    "a view of its argument": lambda x: x[:, 1:3],
    "a transposed view": lambda x: x.t(),
    "a tuple": lambda x: (x + 1, x[:, :2], x),
    "nested": lambda x: {"a": [x + 1, None], "b": (x.sum(-1), True, 3)},
    "a dataclass": lambda x: Pair(x - 1, x.t()),
    "nothing": lambda x: None,
    "an expanded tensor": lambda x: x.sum().expand(3, 4),
    "channels last": lambda x: x.t().contiguous().t(),
    "empty": lambda x: x[:0] + 1,
    "another dtype": lambda x: x.double(),
    "an integer index": lambda x: x.argmax(-1),
}


def total(result: Any) -> Any:
    """Everything in a result, in one number per call."""
    if isinstance(result, Tensor):
        return result.double().sum() if result.numel() else 0
    if isinstance(result, Pair):
        return total(result.left) * total(result.right)
    if isinstance(result, dict):
        return sum(total(value) for value in result.values())
    if isinstance(result, (list, tuple)):
        return sum(total(value) for value in result)
    return 0 if result is None else result


class Returning(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = sg.eager_break(function)

    def forward(self, x: Tensor) -> Any:
        hidden = x * 2
        result = self.function(hidden)
        return hidden + total(result), result if isinstance(result, Tensor) else hidden


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whatever_a_break_returns_the_next_segment_reads_it(
    device: torch.device, kind: str, mode: Callable[[], Any]
) -> None:
    module = Returning(RESULTS[kind])
    model = piecewise(module, device, padding=False, capture_sizes=[3])
    with torch.inference_mode(False), mode():
        for _ in range(6):
            x = torch.randn(3, 4, device=device)
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 5
    assert graphs(model)[0].breaks == 1


def test_a_break_that_writes_into_out_copies_nothing(device: torch.device) -> None:
    seen: list[int] = []

    @sg.eager_break
    def into(x: Tensor, out: Tensor) -> Tensor:
        seen.append(out.data_ptr())
        return torch.mul(x, 2, out=out)

    module = Model(lambda x: into(x, torch.empty_like(x)))
    model = piecewise(module, device, capture_sizes=[4])
    model.capture_graphs(torch.randn(4, 4, device=device))
    program = next(iter(model.graph_manager.programs.values()))
    seen.clear()
    for _ in range(3):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert len(set(seen[::2])) == 1  # replays and eager calls take turns
    assert len(program.breaks) == 1


@pytest.mark.parametrize(
    ("kind", "breaks"),
    [("twice", 1), ("split", 1), ("a view beside it", None)],
)
def test_results_that_share_memory_share_it_in_the_graph_too(device: torch.device, kind: str, breaks: Any) -> None:
    def sharing(x: Tensor) -> Any:
        made = x * 2
        return {"twice": (made, made), "split": made.split(2, -1), "a view beside it": (made, made[:, :2])}[kind]

    several = sg.eager_break(sharing)

    class Writing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            first, second = several(x + 1)
            first.add_(1)
            return first * 1, second * 1

    module = Writing()
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        for actual, expected in zip(model(x), module(x), strict=True):
            torch.testing.assert_close(actual, expected)
    assert [graph.breaks for graph in graphs(model)] == ([breaks] if breaks else [])
    assert breaks or "overlap in memory" in next(iter(model.graph_stats.failures.values()))


@pytest.mark.parametrize("capture", ["lazy", "upfront"])
@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("part", [slice(None), slice(1, 3)])
def test_what_a_break_writes_into_an_argument_of_the_call_reaches_the_caller(
    device: torch.device, capture: str, rows: int, part: slice
) -> None:
    grow = sg.eager_break(lambda x, y: x[:, part].add_(y[:, part]))

    class Growing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            grow(x, x * 2)
            return x + 1

    module = Growing()
    model = piecewise(module, device, capture_sizes=[4], capture=capture)
    if capture == "upfront":
        model.configure_graphs(num_warmups=rows - 3)  # none, too: what breaks return is learnt all the same
        model.capture_graphs(torch.randn(4, 4, device=device))
    for _ in range(5):
        x = torch.randn(rows, 4, device=device)
        other = x.clone()
        torch.testing.assert_close(model(x), module(other))
        torch.testing.assert_close(x, other)
    assert model.graph_stats.replays > 0


class Switch:
    """What a break returns; set by a test."""

    function: Callable[[Tensor], Any] = staticmethod(lambda x: x + 1)


@sg.eager_break
def switched(x: Tensor) -> Any:
    return Switch.function(x)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (lambda x: x + 1, lambda x: x[:2] + 1, r"\(2, 4\).*in place of.*\(4, 4\)"),
        (lambda x: x + 1, lambda x: x.double(), "float64.*in place of.*float32"),
        (lambda x: x + 1, lambda x: None, "None in place of a tensor"),
        (lambda x: x + 1, lambda x: (x, x), "a tuple of 2 where it returned one value"),
        (lambda x: x, lambda x: x + 1, "another address"),
        (lambda x: x[:2], lambda x: x[2:], "another address"),
        (lambda x: 3, lambda x: 4, "4 in place of 3"),
        (lambda x: 1, lambda x: True, "True in place of 1"),
    ],
)
def test_another_result_than_before_is_an_error_before_the_next_segment_runs(
    device: torch.device, before: Any, after: Any, words: str
) -> None:
    after_break = torch.zeros(1, device=device)

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result = switched(x * 2)
            after_break.add_(1)
            return x + (result.sum() if isinstance(result, Tensor) else 0)

    Switch.function = before
    module = Counting()
    model = piecewise(module, device, capture_sizes=[4])
    x = torch.randn(4, 4, device=device)
    for _ in range(3):
        model(x)
    ran = after_break.item()
    Switch.function = after
    with pytest.raises(BreakError, match="(?s)" + words + ".*reset_graphs"):
        model(x)
    assert after_break.item() == ran
    Switch.function = before
    torch.testing.assert_close(model(x), module(x))


def test_memory_from_elsewhere_is_read_in_place_and_a_move_is_refused(device: torch.device) -> None:
    cache = [torch.ones(4, device=device)]

    @sg.eager_break
    def lookup(x: Tensor) -> Tensor:
        return cache[0]

    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found = lookup(x)
            found.add_(1)
            return x + found

    model = piecewise(Reading(), device, capture_sizes=[4])
    x = torch.zeros(4, 4, device=device)
    results = [model(x)[0, 0].item() for _ in range(4)]
    assert results == [2, 3, 4, 5]
    assert cache[0][0].item() == 5
    cache[0] = torch.full((4,), 10.0, device=device)
    with pytest.raises(BreakError, match="another address"):
        model(x)


# What breaks are passed.


class Metadata:
    """What an engine sets before every step."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.tables: dict[str, float] = {"bias": 0.0}


@pytest.mark.parametrize("passed", ["object", "dict", "context", "dict beside a tensor"])
def test_what_a_break_reads_is_read_at_every_replay(device: torch.device, passed: str) -> None:
    metadata = Metadata()

    @sg.eager_break
    def reading(x: Tensor, given: Any) -> Tensor:
        if passed == "dict beside a tensor":
            x, given = given
        if "dict" in passed:
            return x + given["bias"]
        return x * (given or metadata).scale

    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            beside = x + 1, metadata.tables
            given = {"object": metadata, "dict": metadata.tables, "context": None, "dict beside a tensor": beside}
            return reading(x + 1, given[passed]) * 2

    module = Reading()
    model = piecewise(module, device, capture_sizes=[4])
    for step in range(6):
        metadata.scale = metadata.tables["bias"] = float(step)
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 5


def test_containers_of_captured_tensors_are_new_ones_at_every_replay(device: torch.device) -> None:
    replaying = False

    @sg.eager_break
    def greedy(parts: list[Tensor], named: dict[str, Any]) -> Tensor:
        total = parts[0] * named["factor"] + parts[1]
        assert len(parts) == 2
        if replaying:
            parts.append(total)
            named["factor"] = None
        return total

    class Lists(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return greedy([x + 1, x + 2], {"factor": x * 3}) * 2

    module = Lists()
    model = piecewise(module, device, capture_sizes=[4])
    model(torch.randn(4, 4, device=device))
    replaying = True
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 4


def test_an_object_returned_by_one_break_reaches_the_next_anew_at_every_replay(device: torch.device) -> None:
    class Work:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    start = sg.eager_break(lambda x: Work(x * 3))
    finish = sg.eager_break(lambda work, x: work.value + x)

    class Overlapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            work = start(x + 1)
            other = x * 5
            return finish(work, other) * 2

    module = Overlapped()
    model = piecewise(module, device)
    check_equal(model, module, device)
    assert graphs(model)[0].breaks == 2


def test_a_tensor_that_only_a_break_reads_is_kept_alive(device: torch.device) -> None:
    holder = [torch.full((4,), 7.0, device=device)]

    class Borrowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Model.middle_of(x * 1, holder[0])

    Model.middle_of = staticmethod(sg.eager_break(lambda x, table: x + table))  # type: ignore[attr-defined]
    model = piecewise(Borrowing(), device, capture_sizes=[4])
    x = torch.zeros(4, 4, device=device)
    for _ in range(3):
        model(x)
    holder.clear()
    for _ in range(20):
        torch.full((4,), float("nan"), device=device)
        assert model(x)[0, 0].item() == 7


def test_a_replaced_weight_is_read_by_breaks_and_segments(device: torch.device) -> None:
    module = stack(1)
    sg.break_at(module, "*.attn")
    model = piecewise(module, device)
    check_equal(model, module, device)
    module[0].attn.proj.weight = nn.Parameter(torch.randn(4, 4, device=device))
    module[0].mlp.weight.data = torch.randn(4, 4, device=device)
    check_equal(model, module, device)


@pytest.mark.parametrize("held", ["an attribute", "a list"])
@pytest.mark.parametrize("capture", ["lazy", "upfront"])
def test_a_replaced_tensor_that_only_a_break_is_passed_is_noticed(
    device: torch.device, held: str, capture: str
) -> None:
    add = sg.eager_break(lambda x, table: x + table)

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.ones(4, device=device)
            self.tables = [torch.ones(4, device=device)]

        def forward(self, x: Tensor) -> Tensor:
            return add(x * 2, self.table if held == "an attribute" else self.tables[0]) * 3

    module = Passing()
    model = piecewise(module, device, capture=capture)
    for value in (1.0, 2.0, 3.0):
        module.table = torch.full((4,), value, device=device)
        module.tables[0] = torch.full((4,), value, device=device)
        if capture == "upfront":
            model.capture_graphs(torch.randn(4, 4, device=device))
        check_equal(model, module, device)


def test_after_an_exception_in_a_break_padding_rows_are_padding_again(device: torch.device) -> None:
    trouble: list[Exception] = []

    @sg.eager_break
    def fills(x: Tensor) -> None:
        x.fill_(7.0)
        if trouble:
            raise trouble.pop()

    class Filling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.sum(0, keepdim=True)  # shows what padding holds
            hidden = x + total
            fills(x)
            return hidden

    model = piecewise(Filling(), device, capture_sizes=[4])
    for step in range(8):
        x = torch.randn(3, 4, device=device)
        expected = x + x.sum(0, keepdim=True)
        if step in (4, 6):
            trouble.append(Trouble())
            with pytest.raises(Trouble):
                model(x)
        else:
            torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays > 0


def test_a_break_that_computes_gradients_keeps_no_graph_of_earlier_calls(device: torch.device) -> None:
    weight = torch.ones(4, device=device, requires_grad=True)

    @sg.eager_break
    def differentiable(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * weight

    model = piecewise(Model(differentiable), device, capture_sizes=[4])
    with torch.inference_mode(False), torch.no_grad():
        for _ in range(4):
            model(torch.randn(4, 4, device=device))
        (program,) = model.graph_manager.programs.values()
        targets = [accept.__self__.target for step in program.breaks for accept in step.accepts]
    assert targets
    assert all(target.grad_fn is None for target in targets)


class Keeping(nn.Module):
    """Keeps what it is passed, always or later on."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.last: Any = None

    @sg.eager_break
    def keep(self, x: Tensor) -> None:
        if self.at_once:
            self.last = x

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        self.keep(hidden)
        return hidden + 1


def test_a_break_that_keeps_a_captured_tensor_is_found_in_debug(device: torch.device) -> None:
    module = Keeping(at_once=False)
    model = piecewise(module, device, debug=True, capture_sizes=[4])
    x = torch.randn(4, 4, device=device)
    for _ in range(4):
        model(x)
    module.at_once = True
    with pytest.raises(StaleGraphError, match=r"last.*Store a clone"):
        model(x)


# What surrounds a break.


def modes(device: torch.device) -> tuple[Any, ...]:
    kind = device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


CONTEXTS: dict[str, Callable[[str], Any]] = {
    "no_grad": lambda kind: torch.no_grad(),
    "inference_mode": lambda kind: torch.inference_mode(),
    "out of inference_mode": lambda kind: torch.inference_mode(False),
    "autocast": lambda kind: torch.autocast(kind, dtype=torch.bfloat16),
    "no autocast": lambda kind: torch.autocast(kind, enabled=False),
}


@pytest.mark.parametrize("outer", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("inner", CONTEXTS)
def test_a_break_sees_the_modes_that_the_forward_sets_around_it(
    device: torch.device, outer: Callable[[], Any], inner: str
) -> None:
    seen: list[tuple[Any, ...]] = []
    look = sg.eager_break(lambda x: seen.append(modes(device)))

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            with CONTEXTS[inner](device.type):
                look(hidden)
            return hidden * 2

    model = piecewise(Around(), device, capture_sizes=[4])
    with torch.inference_mode(False), outer():
        for _ in range(5):
            model(torch.randn(4, 4, device=device))
    assert model.graph_stats.replays == 4
    assert len(seen) == 5
    assert len(set(seen)) == 1


def test_a_break_in_grad_mode_builds_no_autograd_graph(device: torch.device) -> None:
    module = Returning(lambda x: x + 1)  # no parameters: grad mode alone does not keep it from graphs
    model = piecewise(module, device, capture_sizes=[4])
    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(5):
            x = torch.randn(4, 4, device=device)
            torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0)[0],
        lambda x: x.set_(torch.ones_like(x)),
    ],
    ids=["unsqueeze_", "set_"],
)
def test_a_break_that_reshapes_or_repoints_its_argument_keeps_that_size_eager(
    device: torch.device, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    module = Model(sg.eager_break(change))
    model = piecewise(module, device, capture_sizes=[4])
    x = torch.randn(4, 4, device=device)
    for _ in range(4):
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.eager[sg.Reason.CAPTURE_FAILED] == 3
    assert "reshapes or re-points a tensor it is passed" in next(iter(model.graph_stats.failures.values()))


def _put_into_a_dict(put: Any, x: torch.Tensor) -> torch.Tensor:
    values = {"x": x + 1}
    put(values)
    return values["x"] * 2


def _append_to_a_list(put: Any, x: torch.Tensor) -> torch.Tensor:
    values = [x + 1]
    put(values)
    return values[-1] * 2


def _append_to_a_new_list(put: Any, x: torch.Tensor) -> torch.Tensor:
    put([x])
    return x * 2


@pytest.mark.parametrize(
    ("forward", "change"),
    [
        (_put_into_a_dict, lambda values: values.update(x=values["x"] * 3)),
        (_append_to_a_list, lambda values: values.append(values[0] * 3)),
        (_append_to_a_new_list, lambda values: values.append(values[0] * 3)),
    ],
    ids=["dict", "list", "new list"],
)
def test_a_break_that_changes_a_container_it_is_passed_keeps_that_size_eager(
    device: torch.device, forward: Callable[..., torch.Tensor], change: Callable[[Any], None]
) -> None:
    put = sg.eager_break(change)

    class Changing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(put, x)

    module = Changing().eval()
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert "changes a list, dict or dataclass it is passed" in next(iter(model.graph_stats.failures.values()))


class Leaving(nn.Module):
    """A forward whose break leaves a tensor behind instead of returning it, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.left: Any = None

    @sg.eager_break
    def leave(self, x: Tensor) -> Any:
        if self.way == "object":
            return SimpleNamespace(value=x * 3)
        self.left = x * 3
        return None

    @sg.eager_break
    def take(self, left: Tensor) -> Tensor:
        return left + 1

    def forward(self, x: Tensor) -> Tensor:
        given = self.leave(x + 1)
        if self.way == "object":
            return given.value * 2
        if self.way == "attribute":
            return self.left * 2
        if self.way == "output":
            return cast(Tensor, self.left)
        return self.take(self.left) * 2


@pytest.mark.parametrize("way", ["object", "attribute", "output", "next break"])
def test_what_a_break_leaves_behind_instead_of_returning_is_never_replayed(device: torch.device, way: str) -> None:
    module = Leaving(way).eval()
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert "makes a tensor without returning it" in next(iter(model.graph_stats.failures.values()))


def test_what_a_break_keeps_for_itself_is_its_own_affair(device: torch.device) -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum: Tensor | None = None

        @sg.eager_break
        def accumulate(self, x: Tensor) -> Tensor:
            self.sum = x.clone() if self.sum is None else self.sum + x
            return self.sum * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.accumulate(self.accumulate(x + 1)) * 2

    module, twin = Keeping().eval(), Keeping().eval()
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), twin(x))
    assert model.graph_stats.replays == 3


def test_a_sparse_tensor_passed_to_a_break_is_read_at_every_replay(device: torch.device) -> None:
    weight = torch.eye(4, device=device).to_sparse()
    multiply = sg.eager_break(lambda weight, x: torch.sparse.mm(weight, x))

    class Sparse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return multiply(weight, x + 1) * 2

    model = piecewise(Sparse(), device, capture_sizes=[4])
    for step in range(4):
        weight.values().fill_(step)
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), (x + 1) * step * 2)
    assert model.graph_stats.replays == 3


def test_an_exception_at_a_break_that_the_forward_swallows_is_no_graph_without_the_break(device: torch.device) -> None:
    reshape = sg.eager_break(lambda x: x.unsqueeze_(0))

    class Swallowing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            try:
                return reshape(hidden)[0] * 2
            except Exception:
                return hidden * 3

    module = Swallowing()
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.captures == 0


class Trouble(Exception):
    pass


def test_after_an_exception_in_a_break_the_next_call_is_right(device: torch.device) -> None:
    trouble: list[Exception] = []

    @sg.eager_break
    def risky(x: Tensor) -> Tensor:
        if trouble:
            raise trouble.pop()
        return x * 2

    module = Model(risky)
    model = piecewise(module, device)
    for _ in range(6):
        trouble.append(Trouble("from the user"))
        with pytest.raises(Trouble, match="from the user"):
            model(torch.randn(3, 4, device=device))
        check_calls = torch.randn(3, 4, device=device)
        torch.testing.assert_close(model(check_calls), module(check_calls))
    assert model.graph_stats.replays > 0
    assert model.graph_stats.failures == {}


def test_breaks_may_differ_between_sizes(device: torch.device) -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            if x.shape[0] > 2:
                double_into(hidden, out := torch.empty_like(hidden))
                hidden = out
            return doubled(hidden) * 2

    module = Branching()
    model = piecewise(module, device, capture="upfront")
    model.capture_graphs(torch.randn(4, 4, device=device))
    check_equal(model, module, device)
    assert sorted(graph.breaks for graph in graphs(model)) == [1, 2]


def test_a_break_that_calls_a_wrapped_module_runs_it_eagerly(device: torch.device) -> None:
    inner_module = nn.Linear(4, 4)
    inner = piecewise(inner_module, device, mode="FULL")
    module = Model(sg.eager_break(lambda x: inner(x)))
    model = piecewise(module, device)
    check_equal(model, module, device)
    replays = inner.graph_stats.replays
    model(torch.randn(4, 4, device=device))
    assert inner.graph_stats.replays == replays
    assert inner.graph_stats.eager[sg.Reason.NESTED] > 0


def test_a_break_that_enters_its_own_wrapper_again_gets_eagers_answer(device: torch.device) -> None:
    models: list[Any] = []

    @sg.eager_break
    def again(x: Tensor, depth: int) -> Tensor:
        return models[0](x, depth - 1) if depth else x * 2

    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return again(x + 1, depth) * 3

    module = Recursive()
    models.append(piecewise(module, device))
    check_equal(models[0], module, device)


@pytest.mark.parametrize("what", ["capture_graphs", "reset_graphs"])
def test_graphs_are_not_replaced_from_inside_a_forward(device: torch.device, what: str) -> None:
    models: list[Any] = []
    active: list[bool] = []

    @sg.eager_break
    def meddle(x: Tensor) -> None:
        if active:
            models[0].reset_graphs() if what == "reset_graphs" else models[0].capture_graphs(x)

    class Meddling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x + 1
            meddle(hidden)
            return hidden * 2

    models.append(piecewise(Meddling(), device, capture_sizes=[4]))
    x = torch.randn(4, 4, device=device)
    for _ in range(3):
        models[0](x)
    active.append(True)
    with pytest.raises(CaptureError, match=f"{what} was called inside"):
        models[0](x)
    active.clear()
    torch.testing.assert_close(models[0](x), (x + 1) * 2)


def test_a_compiler_sees_through_a_break() -> None:
    tripled = sg.eager_break(lambda x: x * 3)
    compiled = torch.compile(lambda x: tripled(x) + 1, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).item() == 4


def test_a_traced_module_with_breaks_runs_as_it_is(device: torch.device) -> None:
    module = Model().to(device).eval()
    x = torch.randn(3, 4, device=device)
    with torch.inference_mode(False), torch.no_grad():
        traced = torch.jit.trace(module, (x,), check_trace=False)
        torch.testing.assert_close(traced(x), module(x))


# The report.


def test_the_report_names_each_break_and_its_share(device: torch.device) -> None:
    model = piecewise(Model(), device, capture_sizes=[4])
    model.capture_graphs(torch.randn(4, 4, device=device))
    assert "doubled x 1 (timed at the second replay)" in str(model.graph_report())
    for _ in range(3):
        model(torch.randn(4, 4, device=device))
    text = str(model.graph_report())
    assert "doubled x 1" in text
    assert "%" in text
    (graph,) = model.graph_report().to_dict()["graphs"]
    assert [(step["kind"], step["name"]) for step in graph["steps"]] == [
        ("segment", ""),
        ("break", "doubled"),
        ("segment", ""),
    ]
    assert all(step["ms"] > 0 for step in graph["steps"])
    assert graph["steps"][0]["nodes"] == 1
