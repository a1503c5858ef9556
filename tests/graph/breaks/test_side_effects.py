"""A replay stays correct, whatever a break changes, keeps or raises."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.graph.breaks.models import Model, piecewise

pytestmark = pytest.mark.usefixtures("inference_mode")


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

    model = piecewise(Filling(), device, capture_sizes=[4], batch_dims={"x": 0})
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
    model = piecewise(module, device, batch_dims={"x": 0})
    for rows in (3, 2, 3, 2, 3, 3):
        trouble.append(Trouble("from the user"))
        with pytest.raises(Trouble, match="from the user"):
            model(torch.randn(rows, 4, device=device))
        check_calls = torch.randn(rows, 4, device=device)
        torch.testing.assert_close(model(check_calls), module(check_calls))
    assert model.graph_stats.replays > 0
    assert model.graph_stats.failures == {}


class Handle:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Handing(nn.Module):
    """Starts something in a break, and waits for it in another one; `keep` is what else the forward does with it."""

    def __init__(self, keep: Callable[[Any, Handle], None], *, kept_inside: bool = False) -> None:
        super().__init__()
        self.keep, self.kept_inside = keep, kept_inside
        self.queue: list[Handle] = []
        self.last: Any = None

    @sg.eager_break
    def start(self, x: Tensor) -> Any:
        handle = Handle(x * 2)
        self.queue[:] = [handle] * self.kept_inside
        return self.queue if self.kept_inside else (handle, None)

    @sg.eager_break
    def wait(self, handle: Handle) -> Tensor:
        self.queue.append(handle)
        return handle.hidden + 1

    def forward(self, x: Tensor) -> Tensor:
        handle, *_ = self.start(x + 1)
        self.keep(self, handle)
        return self.wait(handle) * 3


def _keep_in_a_cycle(module: Handing, handle: Handle) -> None:
    cycle: list[Any] = [handle]
    cycle.append(cycle)


KEEPS: dict[str, Callable[[Handing, Handle], None]] = {
    "attribute": lambda module, handle: setattr(module, "last", handle),
    "in a container": lambda module, handle: setattr(module, "last", {"deep": [handle]}),
}
KEEPS_NOT = {"nothing": lambda module, handle: None, "cycle": _keep_in_a_cycle}


@pytest.mark.parametrize("keep", KEEPS.values(), ids=KEEPS)
def test_an_object_of_a_break_that_the_forward_keeps_is_each_calls_own(
    keep: Callable[[Handing, Handle], None], device: torch.device
) -> None:
    module = Handing(keep)
    model = piecewise(module, device, capture_sizes=[4], padding=False)
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), ((x + 1) * 2 + 1) * 3)
        last = module.last["deep"][0] if isinstance(module.last, dict) else module.last
        torch.testing.assert_close(last.hidden, (x + 1) * 2)
    assert model.graph_stats.captures == 0
    assert "the forward changes `last` whenever it runs" in next(iter(model.graph_stats.failures.values()))


@pytest.mark.parametrize("kept_inside", [False, True])
@pytest.mark.parametrize("keep", KEEPS_NOT.values(), ids=KEEPS_NOT)
def test_an_object_that_only_breaks_keep_is_handed_on(
    keep: Callable[[Handing, Handle], None], kept_inside: bool, device: torch.device
) -> None:
    module = Handing(keep, kept_inside=kept_inside)
    model = piecewise(module, device, capture_sizes=[4], padding=False)
    for _ in range(5):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), ((x + 1) * 2 + 1) * 3)
        torch.testing.assert_close(module.queue[-1].hidden, (x + 1) * 2)
    assert model.graph_stats.replays > 0


class ImageList:
    """A plain class around a tensor, as torchvision's detectors pass on."""

    def __init__(self, tensors: Tensor, image_sizes: list[tuple[int, int]]) -> None:
        self.tensors = tensors
        self.image_sizes = image_sizes


class Transform(nn.Module):
    def forward(self, x: Tensor) -> tuple[ImageList, None]:
        return ImageList(x / 2, [(4, 4)]), None


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transform = Transform()
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        images, _ = self.transform(x)
        return cast(Tensor, self.body(images.tensors))


def test_a_tensor_returned_inside_a_plain_class_keeps_that_size_eager(device: torch.device) -> None:
    module = Detector().eval()
    assert sg.break_at(module, "transform") == ["transform"]
    model = piecewise(module, device, capture_sizes=[4])
    for _ in range(4):
        x = torch.randn(4, 4, device=device)
        torch.testing.assert_close(model(x), module(x))
    said = next(iter(model.graph_stats.failures.values()))
    assert "Return tensors by themselves or in tuples, lists, dicts or dataclasses" in said


KEPT: list[Any] = []
KEEPERS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda x: KEPT.append(x),
    "a view": lambda x: KEPT.append(x[0]),
    "a tuple": lambda x: KEPT.append((len(x), x)),
}


@pytest.mark.parametrize("passed", ["made", "input"])
@pytest.mark.parametrize("name", KEEPERS)
def test_a_break_that_keeps_what_it_is_passed_keeps_that_size_eager(
    name: str, passed: str, device: torch.device
) -> None:
    keep = sg.eager_break(KEEPERS[name])

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            keep(hidden if passed == "made" else x)
            return hidden + 1

    model = piecewise(Net(), device, capture_sizes=[4])
    KEPT.clear()
    xs = [torch.full((4, 4), float(step), device=device) for step in range(5)]
    for x in xs:
        model(x.clone())
    kept = [found[-1] if isinstance(found, tuple) else found for found in KEPT]
    assert [float(found.flatten()[0]) for found in kept] == [
        step * (2.0 if passed == "made" else 1.0) for step in range(5)
    ]
    assert "keeps a tensor that it is passed" in next(iter(model.graph_stats.failures.values()))
    KEPT.clear()


def test_a_break_that_returns_or_copies_what_it_is_passed_keeps_nothing(device: torch.device) -> None:
    clones: list[Tensor] = []

    @sg.eager_break
    def look(x: Tensor) -> Tensor:
        clones.append(x.clone())
        return x[:]

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return look(x * 2) + 1

    model = piecewise(Net(), device, capture_sizes=[4])
    xs = [torch.full((4, 4), float(step), device=device) for step in range(5)]
    for x in xs:
        torch.testing.assert_close(model(x), x * 2 + 1)
    assert [float(clone[0, 0]) for clone in clones] == [step * 2.0 for step in range(5)]
    assert model.graph_stats.replays >= 2


def test_a_handle_that_keeps_what_its_break_was_passed_is_handed_to_a_later_break(device: torch.device) -> None:
    """As the work of a collective that was begun, and is waited for later."""

    class Work:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    start = sg.eager_break(lambda tensor: Work(tensor))
    wait = sg.eager_break(lambda work: work.tensor.add_(1).sum())

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            work = start(hidden)
            other = x * 3
            return other + wait(work) + hidden

    model = piecewise(Net(), device, capture_sizes=[4])
    for step in range(5):
        x = torch.full((4, 4), float(step), device=device)
        torch.testing.assert_close(model(x), x * 3 + (x * 2 + 1).sum() + x * 2 + 1)
    assert model.graph_stats.replays >= 2


def test_a_break_in_a_backward_is_part_of_the_graph_and_what_follows_is_too(device: torch.device) -> None:
    doubled = sg.eager_break(lambda gradient: gradient * 2)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return doubled(gradient)

    weights, replays = [], 0
    with torch.inference_mode(False), torch.enable_grad():
        for graphed in (False, True):
            torch.manual_seed(0)
            net = nn.Linear(4, 4, device=device)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

            def step(x: Tensor, net: nn.Linear = net, optimizer: torch.optim.SGD = optimizer) -> Tensor:
                loss = Twice.apply(net(x)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            run: Any = sg.train_step(step, optimizers=optimizer, mode="PIECEWISE", progress=False) if graphed else step
            for value in range(6):
                run(torch.full((2, 4), float(value), device=device))
            weights.append(net.weight.detach())
            replays = run.graph_stats.replays if graphed else 0
    torch.testing.assert_close(*weights)
    assert replays >= 2


class Widening(nn.Module):
    """Reads a number that its break changes once sums grow large."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        if x.sum().item() > 100:
            self.factor += 1.0
        return x + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.look(x * self.factor) * 2


def test_a_number_that_a_break_changes_counts_in_the_next_call_if_the_forward_reads_it(device: torch.device) -> None:
    module = Widening()
    model, factor = piecewise(module, device, capture_sizes=[4]), 1.0
    for call in range(24):
        x = torch.full((4, 4), 20.0 if call in (8, 14) else 0.5, device=device)
        assert torch.equal(model(x), (x * factor + 1) * 2)
        factor += call in (8, 14)
        assert module.factor == factor
    assert model.graph_stats.replays > 4


LARGE = False


@dataclasses.dataclass(frozen=True)
class Found:
    large: bool = False


class Deciding(nn.Module):
    """Reads a flag, wherever it is kept, that its break has just set by the data."""

    def __init__(self, way: str, *, is_before: bool = False) -> None:
        super().__init__()
        global LARGE
        LARGE = False
        self.way, self.is_large, self.is_before = way, False, is_before
        self.found, self.state, self.frozen = {"large": False}, SimpleNamespace(large=False), Found()

    def note(self, is_large: bool) -> None:
        self.is_large = is_large

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        global LARGE
        is_large = bool(x[0, 0] > 0)
        if self.way == "attribute":
            self.is_large = is_large
        elif self.way == "method":
            self.note(is_large)
        elif self.way == "setattr":
            setattr(self, "is_" + "large", is_large)
        elif self.way == "dict":
            self.found["large"] = is_large
        elif self.way == "new dict":
            self.found = {"large": is_large}
        elif self.way == "object":
            self.state.large = is_large
        elif self.way == "new object":
            self.frozen = Found(is_large)
        elif self.way == "global":
            LARGE = is_large
        else:
            return x * 2 if is_large else x.clone()
        return x.clone()

    def read(self) -> bool:
        return self.is_large or self.found["large"] or self.state.large or self.frozen.large or LARGE

    def forward(self, x: Tensor) -> Tensor:
        before = self.read()
        y = self.look(x + 1)
        return y * 2 if (before if self.is_before else self.read()) else y + 0


WAYS = ("attribute", "method", "setattr", "dict", "new dict", "object", "new object", "global")


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("way", WAYS)
def test_calls_run_eagerly_once_a_break_set_what_the_forward_reads(
    device: torch.device, caplog: pytest.LogCaptureFixture, way: str, mode: str
) -> None:
    model = piecewise(Deciding(way), device, capture_sizes=[4], verify=0, mode=mode)
    for call in range(400):
        is_large = call > 6 and call % 40 > 20
        x = torch.full((4, 4), 0.5 if is_large else -1.5, device=device)
        assert torch.equal(model(x), (x + 1) * (1 + is_large)), call
    assert model.graph_stats.replays > 10
    assert "which an eager break set and the forward may read: let the break do what depends on it" in caplog.text


class Limited(nn.Module):
    """Reads a number that other code sets, and its break sets as well for some data."""

    scale = 1.0

    @sg.eager_break
    def limit(self, x: Tensor) -> Tensor:
        if x.amax() > 50:
            self.scale = 0.5
        return x.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.limit(x + 1) * self.scale


def test_a_break_may_set_a_number_whose_new_values_already_made_calls_run_eagerly(device: torch.device) -> None:
    model = piecewise(Limited(), device, capture_sizes=[4], verify=0)
    for call in range(20):
        sg.unwrap(model).scale = 3.0 * call
        x = torch.full((4, 4), 100.0 * (call == 12), device=device)
        assert torch.equal(model(x), (x + 1) * (0.5 if call == 12 else 3.0 * call)), call


@pytest.mark.parametrize("way", WAYS)
def test_a_number_that_a_break_sets_in_each_call_is_never_stale(device: torch.device, way: str) -> None:
    for verify, is_before in itertools.product((0, 1), (False, True)):
        model = piecewise(Deciding(way, is_before=is_before), device, capture_sizes=[4], verify=verify)
        was_large = False
        for call in range(40):
            is_large = call % 2 == 0
            x = torch.full((4, 4), 0.5 if is_large else -1.5, device=device)
            if call in (9, 10):
                with sg.eager():
                    model(x)
                was_large = is_large
            assert torch.equal(model(x), (x + 1) * (1 + (was_large if is_before else is_large))), (verify, is_before)
            was_large = is_large


def test_proofs_that_find_one_value_do_not_show_that_it_is_not_read(device: torch.device) -> None:
    model = piecewise(Deciding("attribute", is_before=True), device, capture_sizes=[4], verify=1)
    large, small = torch.full((4, 4), 0.5, device=device), torch.full((4, 4), -1.5, device=device)
    was_large = False
    for x, is_eager in [(large, False), *[(small, False), (large, True)] * 3, *[(small, False), (large, False)] * 4]:
        with sg.eager() if is_eager else contextlib.nullcontext():
            assert torch.equal(model(x), (x + 1) * (1 + was_large))
        was_large = x is large


def test_a_proof_names_what_a_break_set(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model = piecewise(Deciding("attribute"), device, capture_sizes=[4], verify=1)
    for call in range(24):
        x = torch.full((4, 4), 0.5 - 2 * (call % 2), device=device)
        assert torch.equal(model(x), (x + 1) * (2 - call % 2))
    assert not model.graph_stats.replays
    assert (
        "set `is_large`, which it may read. If an eager break did, let the break do what depends on it" in caplog.text
    )


def test_a_break_that_does_what_depends_on_a_flag_is_served(device: torch.device) -> None:
    model = piecewise(Deciding("nowhere"), device, capture_sizes=[4])
    for call in range(24):
        x = torch.full((4, 4), 0.5 - 2 * (call % 2), device=device)
        assert torch.equal(model(x), (x + 1) * (2 - call % 2))
    assert model.graph_stats.replays > 10


@dataclasses.dataclass
class Counts:
    scale: float = 2.0
    steps: int = 0


class Noting(nn.Module):
    """Has breaks that keep notes, whose names the forward's code contains as well."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.shape, self.scale = way, None, None
        self.log: list[float] = []
        self.counts, self.masks = Counts(), dict[int, float]()

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        if self.way == "log":
            self.log.append(1.0)
        elif self.way == "counts":
            self.counts.steps += 1
        elif self.way == "shape":
            self.shape = tuple(x.shape)
        elif self.way == "once" and self.scale is None:
            self.scale = 2.0
        elif self.way == "masks":
            self.log.append(self.masks[len(x)])
        return x.clone()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.masks:
            self.masks[len(x)] = 1.0 / len(x)
        y = self.look(x + 1).view(x.shape) * self.masks[len(x)] * self.counts.scale
        return torch.log(y.abs() + 1) * (self.scale or 1)


@pytest.mark.parametrize("way", ["log", "counts", "shape", "once", "masks"])
def test_notes_of_breaks_cost_no_replay(device: torch.device, way: str) -> None:
    model = piecewise(Noting(way), device, capture_sizes=[2, 4], verify=1)
    for call in range(40):
        x = torch.randn(2 if call > 20 else 4, 4, device=device)
        expected = torch.log(((x + 1) / len(x) * 2).abs() + 1) * (2 if way == "once" else 1)
        torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays > 30
    assert len(model.log) == (40 if way in ("log", "masks") else 0)
