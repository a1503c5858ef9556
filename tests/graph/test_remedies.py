"""Each remedy that a failed capture prints works on the case that prints it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

WIDTH = 6
MARK = "mark the function with @simplegraph.eager_break, and set mode='PIECEWISE'"
AROUND = (
    "mark the function that runs the whole backward, or calls torch.func, with @simplegraph.eager_break, and set "
    "mode='PIECEWISE'"
)
BREAKS = ("eager_break", "break_at", "PIECEWISE")
Part = Callable[[Tensor], Tensor]


def reads(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x - 1


def decides_on_the_device(x: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, x * 2, x - 1)


def prints(x: Tensor) -> Tensor:
    assert f"{x}"
    return x * 2


def prints_its_shape(x: Tensor) -> Tensor:
    assert f"{x.shape}"
    return x * 2


def masks(x: Tensor) -> Tensor:
    return x + x[x > 0].sum() / 99


def masks_in_one_shape(x: Tensor) -> Tensor:
    return x + torch.where(x > 0, x, 0).sum() / 99


def writes_where(x: Tensor) -> Tensor:
    y = x * 1
    y[x > 0] = x[x > 0] * 2
    return y


def writes_in_one_shape(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * 2, x)


def finds(x: Tensor) -> Tensor:
    return x + x.abs().argwhere().sum() / 99


def finds_in_one_shape(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    columns = torch.arange(x.shape[1], device=x.device)
    return x + torch.where(x.abs() > 0, rows + columns, 0).sum() / 99


def fails(x: Tensor) -> Tensor:
    if graph_device(x.device).is_capturing():
        raise ValueError("for a reason that nothing knows")
    return x * 2


def does_not_fail(x: Tensor) -> Tensor:
    return x * 2


class Case(NamedTuple):
    """A part that no graph can have, what the message says about it, and the same as the message would have it."""

    part: Part
    said: str
    mended: Part


CASES = [
    Case(
        reads,
        "Test it on the device (torch.where), or return the tensor and read it after the call",
        decides_on_the_device,
    ),
    Case(prints, "Print its shape, or print outside the forward", prints_its_shape),
    Case(masks, "Keep the shape: torch.where(mask, x, 0) for x[mask]", masks_in_one_shape),
    Case(writes_where, "and x = torch.where(mask, y, x) for x[mask] = y", writes_in_one_shape),
    Case(finds, "Keep the shape: use operations of fixed shape", finds_in_one_shape),
    Case(fails, "Fix it", does_not_fail),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.part.__name__)


class Net(nn.Module):
    def __init__(self, part: Part) -> None:
        super().__init__()
        self.first, self.second, self.part = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), part

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.part(self.first(x)))


class Service:
    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def double(self, x: Tensor) -> Tensor:
        doubled: Tensor = self.net(x) * 2
        return doubled


def as_module(part: Part, device: torch.device) -> Any:
    return Net(part).to(device).eval()


def as_function(part: Part, device: torch.device) -> Any:
    net = Net(part).to(device).eval()
    return lambda x: net(x) * 2


def as_method(part: Part, device: torch.device) -> Any:
    return Service(Net(part).to(device).eval()).double


def batches(device: torch.device) -> Iterator[Tensor]:
    """Yield batches of which some take either way through `reads`."""
    for step in range(8):
        yield torch.randn(4, WIDTH, device=device) + (3 if step % 2 else -3)


def message_of(target: Any, device: torch.device, mode: Any = "FULL") -> str:
    served: Any = sg.wrap(target, capture_sizes=[4], progress=False, mode=mode)
    (error,) = served.capture_graphs(torch.randn(4, WIDTH, device=device)).failed.values()
    return str(error)


def check_served(target: Any, device: torch.device, **settings: Any) -> None:
    served: Any = sg.wrap(target, capture_sizes=[4], progress=False, **settings)
    for x in batches(device):
        torch.testing.assert_close(served(x), target(x))
    assert served.graph_stats.replays >= 4
    assert not served.graph_stats.failures


@cases
@pytest.mark.parametrize("make", [as_module, as_function, as_method])
def test_what_a_capture_says_of_the_users_own_part_works(case: Case, make: Any, device: torch.device) -> None:
    message = message_of(make(case.part, device), device)
    assert case.said in message
    assert f"; or {MARK}" in message
    check_served(make(case.mended, device), device)
    check_served(make(sg.eager_break(case.part), device), device, mode="PIECEWISE")


@cases
def test_a_function_that_is_marked_already_is_only_told_the_mode(case: Case, device: torch.device) -> None:
    net = as_module(sg.eager_break(case.part), device)
    message = message_of(net, device)
    assert case.said.removesuffix(":") in message
    assert "; or set mode='PIECEWISE', in which the function that is marked with @simplegraph.eager_break" in message
    assert "mark the function with" not in message
    check_served(net, device, mode="PIECEWISE")


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_line_beside_a_function_that_is_marked_is_told_to_be_marked(mode: str, device: torch.device) -> None:
    marked = sg.eager_break(torch.relu)
    message = message_of(as_module(lambda x: reads(marked(x)), device), device, mode)
    assert f"; or {MARK}" in message


# State that a forward keeps.


class Stream(nn.Module):
    """Keeps its state in a list that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.state: Any = []

    def forward(self, x: Tensor) -> Tensor:
        self.state[:] = self.cell(x, tuple(self.state) or None)
        return self.state[0] * 2


class StreamOfTuples(Stream):
    """Does what the message says: the tensors are in a tuple."""

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.cell(x, self.state or None)
        return self.state[0] * 2


class StreamOfAttributes(Stream):
    """Does what the message says: each tensor is in an attribute alone."""

    hidden: Any = None
    memory: Any = None

    def forward(self, x: Tensor) -> Tensor:
        state = None if self.hidden is None else (self.hidden, self.memory)
        self.hidden, self.memory = self.cell(x, state)
        hidden: Tensor = self.hidden
        return hidden * 2


@pytest.mark.parametrize("mended_kind", [StreamOfTuples, StreamOfAttributes])
def test_a_state_in_a_list_is_told_to_lie_in_attributes(mended_kind: type[Stream], device: torch.device) -> None:
    served: Any = sg.wrap(Stream().to(device).eval(), capture_sizes=[4], progress=False)
    for x in batches(device):
        served(x)
    (message,) = served.graph_stats.failures.values()
    assert "`state` would keep a tensor" in message
    assert "keep it in an attribute of a module, alone or in a tuple, with no list, dict or object around it" in message
    mended = mended_kind().to(device).eval()
    served, twin = sg.wrap(mended, capture_sizes=[4], progress=False), copy.deepcopy(mended)
    for x in batches(device):
        torch.testing.assert_close(served(x), twin(x))
    assert served.graph_stats.replays >= 4


class Sessions(nn.Module):
    """Keeps what it returns in a dict, which the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.states: dict[str, Tensor] = {}

    def forward(self, x: Tensor, session: str = "a") -> Tensor:
        self.states[session] = state = self.cell(x, self.states.get(session))
        return state


def test_a_kept_tensor_that_is_returned_is_told_to_be_kept_by_the_caller(device: torch.device) -> None:
    served: Any = sg.wrap(Sessions().to(device).eval(), capture_sizes=[4], progress=False)
    twin = copy.deepcopy(sg.unwrap(served))
    for x in batches(device):
        torch.testing.assert_close(served(x), twin(x))
    message = next(iter(served.graph_stats.failures.values()))
    assert "keep what the call returns in the code that calls it" in message
    assert "If the next call needs it, pass it as an argument" in message
    served, state = sg.wrap(twin.cell, capture_sizes=[4], progress=False), torch.zeros(4, WIDTH, device=device)
    for x in batches(device):
        expected = twin.cell(x, state)
        state = served(x, state)
        torch.testing.assert_close(state, expected)
    assert served.graph_stats.replays >= 4


class Draws(nn.Module):
    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return x * (random.random() if factor is None else factor)


def test_numbers_that_python_draws_are_told_to_be_passed(device: torch.device) -> None:
    served: Any = sg.wrap(Draws().eval(), capture_sizes=[4], progress=False)
    for x in batches(device):
        served(x)
    (message,) = served.graph_stats.failures.values()
    assert "do all else outside the forward, and pass what comes of it as a tensor" in message
    served = sg.wrap(Draws().eval(), capture_sizes=[4], progress=False)
    for x in batches(device):
        factor = torch.tensor(random.random(), device=device)
        torch.testing.assert_close(served(x, factor), x * factor)
    assert served.graph_stats.replays >= 4


# Training: no break can be in such a graph.


class Trained(NamedTuple):
    """A loop that trains: its last loss and its weights."""

    loss: Tensor
    weights: list[Tensor]
    served: Any


def train(part: Part, device: torch.device, how: str) -> Trained:
    """Train with a step in one graph, with graphs of forward and backward, with graphs of parts, or without."""
    torch.manual_seed(0)
    net: Any = Net(part).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    called: Any = sg.wrap(net, training=True, progress=False) if how == "training" else net
    if how == "parts":
        net.first = called = sg.wrap(net.first, training=True, progress=False)
        called, first = net, net.first

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run: Any = step
    if how.startswith("step"):
        run = sg.train_step(step, optimizers=optimizer, progress=False, mode=how.partition(" ")[2] or "FULL")
    torch.manual_seed(1)
    with torch.inference_mode(False), torch.enable_grad():
        for x in batches(device):
            loss = run(x)
    served = {"training": called, "parts": first if how == "parts" else None}.get(how, run)
    return Trained(loss.detach(), [parameter.detach() for parameter in net.parameters()], served)


def check_trained(part: Part, device: torch.device, how: str) -> Any:
    """Compare with training without graphs."""
    found, expected = train(part, device, how), train(part, device, "eager")
    torch.testing.assert_close(found[:2], expected[:2])
    return found.served.graph_stats


@cases
@pytest.mark.parametrize("how", ["step", "training"])
def test_what_a_capture_says_in_training_speaks_of_no_break(case: Case, how: str, device: torch.device) -> None:
    stats = check_trained(case.part, device, how)
    (message,) = stats.failures.values()
    assert case.said in message
    assert not any(word in message for word in BREAKS)
    stats = check_trained(case.mended, device, how)
    assert stats.replays > 0
    assert not stats.failures


def test_a_break_in_a_training_step_is_refused_in_pieces(device: torch.device) -> None:
    """It would read gradients and states of the step before."""
    stats = check_trained(sg.eager_break(reads), device, "step PIECEWISE")
    (message,) = stats.failures.values()
    assert "eager break reads is called in a training step, and would find gradients of the step before" in message
    assert "Do its work on the device (torch.where), or before or after the step" in message
    assert "wrap parts of the model in place of the step: simplegraph.wrap(part, training=True)" in message
    assert check_trained(decides_on_the_device, device, "step").replays > 0
    assert check_trained(reads, device, "parts").replays > 0


def test_an_optimizer_that_steps_in_a_break_never_uses_old_gradients(device: torch.device) -> None:
    weights = []
    for graphed in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(WIDTH, WIDTH, device=device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        update = sg.eager_break(optimizer.step)

        def step(x: Tensor, net: nn.Module = net, optimizer: Any = optimizer, update: Any = update) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(x).square().mean()
            loss.backward()
            update()
            return loss

        run: Any = sg.train_step(step, optimizers=optimizer, mode="PIECEWISE", progress=False) if graphed else step
        torch.manual_seed(1)
        with torch.inference_mode(False), torch.enable_grad():
            for x in batches(device):
                run(x)
        weights.append(net.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


# Gradients in a function's own graph.


class ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return reads(gradient)


def forces(x: Tensor, part: Part) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(part(x * x).sum(), x)[0]


def through_backward(x: Tensor) -> Tensor:
    return forces(x, lambda y: ReadsBackward.apply(y) * y) * 2


def through_transform(x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: reads(x * x).sum())(x) * 2


@pytest.mark.parametrize("function", [through_backward, through_transform])
def test_a_part_of_a_backward_is_run_eagerly_with_the_backward(function: Part, device: torch.device) -> None:
    with torch.inference_mode(False), torch.no_grad():
        assert f"; or {AROUND}" in message_of(function, device)
        marked = sg.eager_break(function)
        check_served(lambda x: marked(x + 1) + 1, device, mode="PIECEWISE")


@pytest.mark.parametrize("part", [reads, lambda x: x.mul_(2), lambda x: (x * 2, x.sum().item())[0]])
@pytest.mark.parametrize("verify", [0, 1])
def test_a_break_that_gradients_flow_through_is_refused(part: Part, verify: int, device: torch.device) -> None:
    """The backward of the capture would not know of it."""
    marked = sg.eager_break(part)

    def function(x: Tensor) -> Tensor:
        return forces(x, lambda x: marked(x * 1) + x)

    with torch.inference_mode(False), torch.no_grad():
        served = sg.wrap(function, capture_sizes=[4], progress=False, mode="PIECEWISE", verify=verify)
        for x in batches(device):
            torch.testing.assert_close(served(x), function(x))
        (message,) = served.graph_stats.failures.values()
        assert "returns or changes what gradients flow through" in message
        assert "mark the function with" not in message
        whole = sg.eager_break(lambda x: forces(x, lambda x: part(x * 1) + x))
        check_served(lambda x: whole(x + 1) + 1, device, mode="PIECEWISE")
        check_served(lambda x: forces(x, lambda y: y + marked(x.detach() * 1)), device, mode="PIECEWISE")


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda part: torch.func.grad(lambda x: part(x).sum())])
def test_a_break_in_a_transform_is_part_of_the_graph(transform: Any, device: torch.device) -> None:
    whole = transform(sg.eager_break(torch.relu))
    with torch.inference_mode(False), torch.no_grad():
        check_served(lambda x: whole(x * 2), device, mode="PIECEWISE")


# Breaks that no graph can have.


def doubled_and_kept(x: Tensor, kept: list[Tensor]) -> Tensor:
    kept.append(x)
    return x * 2


def generated(x: Tensor) -> Tensor:
    return next(iter(sg.eager_break(lambda: (x * factor for factor in (2, 3)))()))


def sparse(x: Tensor) -> Tensor:
    return sg.eager_break(lambda x: x.to_sparse())(x).to_dense()


def overlapping(x: Tensor) -> Tensor:
    one, other = sg.eager_break(lambda x: (y := x * 2, y[:2]))(x)
    return one + other.sum()


def resized(x: Tensor) -> Tensor:
    y = x * 2
    sg.eager_break(lambda y: y.resize_(2, WIDTH))(y)
    return x + y.sum()


def collected(x: Tensor) -> Tensor:
    found: list[Tensor] = [x * 1]
    sg.eager_break(lambda found: found.append(found[0] * 2))(found)
    return found[-1] + 1


def left_behind(x: Tensor) -> Tensor:
    class Holder:
        value: Any = None

    holder = Holder()
    sg.eager_break(lambda x: setattr(holder, "value", x * 2))(x)
    found: Tensor = holder.value + 1
    return found


@pytest.mark.parametrize("part", [generated, sparse, overlapping, resized, collected, left_behind])
def test_a_break_that_no_graph_can_have_may_hold_more(part: Part, device: torch.device) -> None:
    message = message_of(as_module(part, device), device, mode="PIECEWISE")
    assert "eager break" in message
    assert "Let the break hold more: mark a function around it, or break at the module around it" in message
    assert MARK not in message
    check_served(as_module(sg.eager_break(part), device), device, mode="PIECEWISE")

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return part(x)

    model = as_module(Around(), device)
    sg.break_at(model, "part")
    check_served(model, device, mode="PIECEWISE")


def test_a_scripted_function_is_called_in_a_break(device: torch.device) -> None:
    scripted = torch.jit.script(reads_and_adds)
    assert f"; or {MARK}." in message_of(as_module(scripted, device), device)
    check_served(as_module(sg.eager_break(scripted), device), device, mode="PIECEWISE")


def reads_and_adds(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x - 1
