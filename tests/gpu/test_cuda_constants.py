"""CPU tensors in a forward on a GPU: constants are served, values are watched, and the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import Reason

pytestmark = pytest.mark.usefixtures("device_left_alone")


class Held(nn.Module):
    """Calls a function of itself and its input; holds CPU tensors in all the ways that there are."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(4, device="cuda"), requires_grad=False)
        self.temperature = torch.tensor(0.5)
        self.steps = torch.zeros((), dtype=torch.long)
        self.positions = torch.arange(100.0)
        self.table = torch.from_numpy(numpy.arange(100.0))
        self.pinned = torch.ones(4).pin_memory()

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def wrapped(function: Callable[[Any, Tensor], Any], **settings: Any) -> Any:
    with torch.inference_mode(False):
        module = Held(function).eval()
    return sg.wrap(module, **{"capture_sizes": [2], "padding": False, "progress": False, **settings})


def rows(count: int = 2) -> Tensor:
    return torch.randn(count, 4, device="cuda")


def right(model: Any, calls: int = 4, size: int = 2) -> None:
    """Calls give what eager gives, to the bit."""
    for _ in range(calls):
        x = rows(size)
        found, expected = model(x), model.function(model, x.clone())
        for one, other in zip(flatten(found)[0], flatten(expected)[0], strict=True):
            assert one.device == other.device
            assert torch.equal(one, other)


OUTSIDE = nn.Linear(4, 4).requires_grad_(False)


def test_a_module_that_the_forward_moves_is_read_where_it_is() -> None:
    """`to` moves the tensors themselves, whose values a warmup saw on the CPU."""
    model = wrapped(lambda m, x: OUTSIDE.to(x.device)(x))
    for _ in range(3):
        right(model)
        OUTSIDE.cpu()


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], autouse=True)
def _grad_mode(request: pytest.FixtureRequest) -> Any:
    with request.param():
        yield


def _put(x: Tensor, index: Any, value: Any) -> Tensor:
    y = x.clone()
    y[index] = value
    return y


IDIOMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a number": lambda m, x: x * torch.tensor(0.25, device=x.device),
    "a number of another dtype": lambda m, x: x.half() * torch.tensor(0.1, device=x.device),
    "a number on the CPU": lambda m, x: x.half() * torch.tensor(0.1),
    "a number read": lambda m, x: x * torch.arange(4).sum().item(),
    "a list": lambda m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device),
    "as_tensor": lambda m, x: x + torch.as_tensor([1, 2, 3, 4], device=x.device),
    "new_tensor": lambda m, x: x + x.new_tensor([1, 2, 3, 4]),
    "arange().to()": lambda m, x: x + torch.arange(4).to(x.device),
    "arange().cuda()": lambda m, x: x + torch.arange(4).cuda(),
    "type_as": lambda m, x: x + torch.arange(4).type_as(x),
    "linspace().to(x)": lambda m, x: x.half() * torch.linspace(0, 1, 4).to(x.half()),
    "without waiting": lambda m, x: x + torch.arange(4).to(x.device, non_blocking=True),
    "transposed": lambda m, x: x @ torch.arange(16.0).view(4, 4).t().to(x.device),
    "x[..., [-2]]": lambda m, x: x[..., [-2]],
    "x[:, [0, 2]]": lambda m, x: x[:, [0, 2]],
    "a CPU index": lambda m, x: x[:, torch.tensor([2, 0])],
    "two CPU indices": lambda m, x: x[torch.tensor([0, 1]), torch.tensor([3, 1])],
    "a CPU mask": lambda m, x: x[:, torch.tensor([True, False, True, False])],
    "a CPU mask of rows and columns": lambda m, x: x[torch.ones(2, 4).tril().bool()],
    "x[:, [1, 3]] = 0.5": lambda m, x: _put(x, (slice(None), [1, 3]), 0.5),
    "x[0, 0] = 2.0": lambda m, x: _put(x, (0, 0), 2.0),
    "x[0] = a CPU tensor": lambda m, x: _put(x, 0, torch.arange(4.0)),
    "x[CPU index] = a number": lambda m, x: _put(x, (slice(None), torch.tensor([1, 2])), 7.0),
    "x[mask] = a number": lambda m, x: _put(x, x > 0, 7.0),
    "torch.where": lambda m, x: torch.where(x > 0, x, torch.tensor(-1.0)),
    "masked_fill": lambda m, x: x.masked_fill(x > 0, torch.tensor(-1.0)),
    "copy_": lambda m, x: torch.empty_like(x).copy_(torch.arange(4)),
    "written after": lambda m, x: torch.tensor([[0.0] * 4] * 2, device=x.device).add_(x),
    "returned": lambda m, x: (x, torch.tensor([1, 2, 3], device=x.device)),
    "empty": lambda m, x: (x * 2, torch.tensor([], device=x.device)),
    "an attribute": lambda m, x: x * m.temperature,
    "an attribute moved": lambda m, x: x * m.temperature.to(x.device),
    "a large attribute moved": lambda m, x: x + m.positions.detach().type_as(x).to(x.device, copy=True)[:4],
}


@pytest.mark.parametrize("idiom", IDIOMS)
def test_cpu_constants_are_captured_and_equal_eager_to_the_bit(idiom: str) -> None:
    model = wrapped(IDIOMS[idiom])
    right(model, calls=6)
    assert model.graph_stats.failures == {}
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays >= 3


def test_constants_that_follow_the_size_are_right_at_every_size() -> None:
    model = wrapped(
        lambda m, x: x * torch.tensor([1.0 / len(x)] * 4, device=x.device) + torch.arange(len(x)).to(x)[:, None],
        capture_sizes=[1, 2, 3, 4, 5],
    )
    summary = model.capture_graphs(rows(5))
    assert (summary.captured, summary.failed) == (5, {})
    for size in (1, 2, 3, 4, 5):
        right(model, calls=2, size=size)
    assert model.graph_stats.replays == 10


def test_constants_outlive_the_memory_of_the_warmup() -> None:
    model = wrapped(lambda m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device) * m.weight)
    right(model)
    torch.cuda.empty_cache()
    junk = [torch.full((size,), float("nan"), device="cuda") for size in (4, 128, 1024) for _ in range(50)]
    right(model)
    del junk
    assert model.graph_stats.replays >= 6


WRITES = [lambda t: t.fill_(5.0), lambda t: t.data.fill_(6.0), lambda t: t.numpy().fill(7.0)]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x * m.temperature,
        lambda m, x: x * m.temperature.item(),
        lambda m, x: x * m.temperature.to(x.device),
    ],
)
def test_a_written_cpu_attribute_is_never_stale(function: Any, write: Any) -> None:
    model = wrapped(function)
    right(model)
    write(model.temperature)
    right(model)
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.failures == {}


def test_a_large_cpu_attribute_is_watched_by_its_version() -> None:
    model = wrapped(lambda m, x: x + m.positions.to(x.device)[:4])
    right(model)
    model.positions[1:2].add_(1)
    right(model)
    assert model.graph_stats.recaptures == 1


def test_a_forward_that_pins_memory_answers_as_eager_does_whether_torch_captures_that_or_not() -> None:
    model = wrapped(lambda m, x: x + torch.arange(4).pin_memory().to(x.device, non_blocking=True))
    right(model, calls=6)


def test_pinned_memory_is_a_value_like_other_memory_of_the_cpu() -> None:
    model = wrapped(lambda m, x: x + m.pinned.to(x.device, non_blocking=True))
    for value in (1.0, 2.0):
        model.pinned.fill_(value)
        right(model)
        torch.cuda.synchronize()
    assert model.graph_stats.recaptures == 1


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda m, x: (m.steps.add_(1), x * 2)[1], "steps is on the CPU and the forward writes to it"),
        (lambda m, x: x + m.table.to(x.device)[:4], "table is on the CPU and has 800 bytes"),
        (lambda m, x: (torch.rand(()), x * 2), "random numbers are drawn on the CPU"),
        (lambda m, x: x * torch.rand(()).item(), "random numbers are drawn on the CPU"),
    ],
)
def test_what_a_replay_would_not_do_is_refused_with_the_line(function: Any, cause: str) -> None:
    model = wrapped(function)
    for call in range(5):
        x = rows()
        model(x)
        assert model.steps.item() == (call + 1 if "steps" in cause else 0)
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 1
    (message,) = model.graph_stats.failures.values()
    assert cause in message
    assert "test_cuda_constants.py" in message


def test_cpu_random_numbers_are_drawn_at_every_call_and_no_others() -> None:
    model = wrapped(lambda m, x: x * 0 + torch.rand(()))
    torch.manual_seed(1)
    found = [model(rows())[0, 0].item() for _ in range(6)]
    torch.manual_seed(1)
    assert found == [torch.rand(()).item() for _ in range(6)]


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_an_output_made_on_the_cpu_is_a_fresh_tensor_at_every_call(outputs: str) -> None:
    model = wrapped(lambda m, x: (x * 2, torch.arange(3) + 1), outputs=outputs)
    for _ in range(5):
        found = model(rows())[1]
        assert found.tolist() == [1, 2, 3]
        found.zero_()
    assert model.graph_stats.replays >= 2


class Stepped(nn.Module):
    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return x * step.to(x.device) + step


def test_a_small_cpu_argument_is_part_of_the_key_by_its_value() -> None:
    model = sg.wrap(Stepped().eval(), capture_sizes=[2], padding=False)
    step = torch.tensor(1.0)
    for value in (1.0, 2.0, 1.0, 2.0):
        step.fill_(value)
        for _ in range(4):
            x = rows()
            assert torch.equal(model(x, step), x * value + value)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 8
