"""CPU tensors in the forward of a module on a GPU: those on the meta device stand for the GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.serve.builder import GraphBuilder
from tests.support.meta_device import use_meta_device

pytestmark = pytest.mark.usefixtures("on_meta")


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def on_meta(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_meta_device(monkeypatch)
    with request.param():
        yield


# Without values, nothing can be verified.
SETTINGS: dict[str, Any] = {"capture_sizes": [2], "padding": False, "progress": False, "verify": 0}


class Held(nn.Module):
    """Calls a function of itself and its input; holds CPU tensors in all the ways that there are."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.temperature = torch.tensor(0.5)
        self.register_buffer("scale", torch.tensor([1.0, 2.0]))
        self.tables = {"large": torch.from_numpy(numpy.arange(100.0))}
        self.positions = torch.zeros(100)
        self.steps = torch.zeros((), dtype=torch.long)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def wrapped(function: Callable[[Any, Tensor], Any], **settings: Any) -> Any:
    return sg.wrap(Held(function).eval(), **{**SETTINGS, **settings})


def x(rows: int = 2) -> Tensor:
    return torch.empty(rows, 4, device="meta")


def serve(model: Any, calls: int = 4) -> Any:
    results = [model(x()) for _ in range(calls)]
    return results[-1]


@pytest.mark.parametrize("read", [lambda m, x: x * m.temperature, lambda m, x: x * m.temperature.item()])
@pytest.mark.parametrize("write", [lambda t: t.fill_(5.0), lambda t: t.data.fill_(5.0), lambda t: t.numpy().fill(5.0)])
def test_a_written_attribute_makes_the_graphs_stale(read: Any, write: Any) -> None:
    model = wrapped(read)
    serve(model)
    before = model.graph_stats.replays
    assert before >= 1
    serve(model)
    assert model.graph_stats.recaptures == 0
    write(model.temperature)
    serve(model)
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.captures == 2


def test_a_large_attribute_is_watched_by_its_version() -> None:
    with torch.inference_mode(False):
        model = wrapped(lambda m, x: x[:, :1] + m.positions.detach().to(x.device))
    serve(model)
    assert model.graph_stats.replays >= 1
    for write in (lambda t: t[7:8].add_(1), lambda t: t.data.fill_(2.0), lambda t: t.mul_(2)):
        write(model.positions)
        before = model.graph_stats.recaptures
        serve(model)
        assert model.graph_stats.recaptures == before + 1
        assert not model.graph_stats.failures


def test_a_value_that_changes_before_the_capture_is_not_frozen_and_no_failure() -> None:
    model = wrapped(lambda m, x: x + m.temperature.to(x.device))
    for value in (1.0, 2.0, 3.0, 4.0):
        model.temperature.fill_(value)
        model(x())
    assert model.graph_stats.captures == 0
    serve(model)
    assert (model.graph_stats.captures, model.graph_stats.failures) == (1, {})


def test_a_value_that_changes_before_every_call_is_warmed_up_for_no_more_and_named() -> None:
    model = wrapped(lambda m, x: x + m.temperature.to(x.device))
    for step in range(30):
        model.temperature.fill_(float(step))
        model(x())
    stats = model.graph_stats
    assert stats.replays == 0
    assert stats.eager[Reason.WARMUP] == 8
    assert stats.eager[Reason.CAPTURE_FAILED] == 21
    (message,) = stats.failures.values()
    assert "temperature has another value than in the warmup before" in message


def test_an_attribute_that_nothing_reads_is_not_compared() -> None:
    model = wrapped(lambda m, x: x * m.temperature)
    serve(model)
    model.scale.fill_(7.0)
    model.steps.add_(1)
    serve(model)
    assert model.graph_stats.recaptures == 0


def test_an_attribute_that_changes_at_every_call_ends_in_eager_runs_with_the_reason() -> None:
    model = wrapped(lambda m, x: x * m.scale[0])
    for step in range(20):
        model.scale.fill_(float(step))
        model(x())
    assert model.graph_stats.eager[Reason.STALE_TOO_OFTEN] > 0


def _skips_a_layer(m: Any, x: Tensor) -> Tensor:
    """Layer drop, as speech models do it: in evaluation mode the drawn number is never read."""
    for _ in range(3):
        drawn = torch.rand([])
        if not (m.training and drawn < 0.1):
            x = x * 2
    return x


def test_the_next_random_number_of_the_cpu_is_eagers_where_the_forward_reads_none() -> None:
    model, twin = wrapped(_skips_a_layer), Held(_skips_a_layer).eval()
    found: list[list[float]] = []
    for one in (model, twin):
        torch.manual_seed(3)
        found.append([(one(x()), torch.rand(()).item())[1] for _ in range(8)])
    assert found[0] == found[1]
    assert model.graph_stats.replays == 0
    assert "random numbers are drawn on the CPU (aten.rand)" in str(model.graph_stats.failures)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (lambda m, x: x * m.tables["large"].sum(), "tables.large is on the CPU and has 800 bytes"),
        (lambda m, x: m.tables["large"].to(x.device), "tables.large is on the CPU and has 800 bytes"),
        (lambda m, x: (m.steps.add_(1), x * 2)[1], "steps is on the CPU and the forward writes to it"),
        (lambda m, x: (m.scale.mul_(2), x * 2)[1], "scale is on the CPU and the forward writes to it"),
        (lambda m, x: x * torch.rand(()), "random numbers are drawn on the CPU"),
        (lambda m, x: (x, torch.rand(2)), "random numbers are drawn on the CPU"),
    ],
)
def test_what_a_replay_would_not_do_is_refused_with_the_name(function: Any, cause: str) -> None:
    model = wrapped(function)
    steps, scale = model.steps.item(), model.scale.clone()
    serve(model, calls=5)
    stats = model.graph_stats
    assert stats.replays == stats.captures == 0
    assert stats.eager[Reason.CAPTURE_FAILED] >= 1
    (message,) = stats.failures.values()
    assert cause in message
    assert "test_host_values.py" in message
    if "steps" in cause:  # written by every call, and by nothing else
        assert model.steps.item() == steps + 5
    if "scale" in cause:
        assert torch.equal(model.scale, scale * 2**5)


def test_sizes_without_a_warmup_of_their_own_are_refused_too() -> None:
    model = wrapped(lambda m, x: x * torch.rand(()), capture_sizes=[1, 2, 3, 4])
    summary = model.capture_graphs(x(4))
    assert summary.captured == 0
    assert len(summary.failed) == 4


def test_constants_that_follow_the_size_are_captured_at_every_size() -> None:
    model = wrapped(lambda m, x: x + torch.arange(len(x)).to(x.device)[:, None], capture_sizes=[1, 2, 3, 4])
    summary = model.capture_graphs(x(4))
    assert (summary.captured, summary.failed) == (4, {})


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_an_output_made_on_the_cpu_is_the_callers_own_at_every_call(outputs: str) -> None:
    model = wrapped(lambda m, x: (x * 2, torch.arange(3) + 1), outputs=outputs)
    for _ in range(5):
        found = model(x())[1]
        assert found.tolist() == [1, 2, 3]
        found.zero_()
    assert model.graph_stats.replays >= 2


def test_an_output_that_the_module_holds_stays_that_very_tensor() -> None:
    model = wrapped(lambda m, x: (x * 2, m.temperature))
    assert serve(model)[1] is model.temperature
    assert model.graph_stats.replays >= 1


def test_a_graph_keeps_its_constants_alive() -> None:
    model = wrapped(lambda m, x: x + torch.arange(4).to(x.device))
    serve(model)
    (program,) = model._graph_runner.manager.programs.values()
    assert [tuple(copy.shape) for copy in program.constants] == [(4,)]
    model.reset_graphs()
    assert program.constants == []


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        return x * step


def test_a_cpu_argument_is_part_of_the_key_by_its_value() -> None:
    model = sg.wrap(TwoInputs().eval(), **SETTINGS)
    step = torch.tensor(1.0)
    for _ in range(4):
        model(x(), step)
    assert (model.graph_stats.captures, model.graph_stats.eager[Reason.WRONG_DEVICE]) == (1, 0)
    before = model.graph_stats.replays
    model(x(), torch.tensor(1.0))
    assert model.graph_stats.replays == before + 1
    step.fill_(2.0)
    model(x(), step)  # the first call of its kind
    assert model.graph_stats.replays == before + 1
    for _ in range(3):
        model(x(), step)
    assert model.graph_stats.captures == 2
    model(x(), torch.tensor(1.0))  # the graph of that value is still there
    assert model.graph_stats.captures == 2
    assert model.graph_stats.recaptures == 0


class Moves(nn.Module):
    """Moves what it is passed on the CPU to its weight's device, in a way of its own."""

    def __init__(self, move: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
        self.kept = torch.empty(2, 4, device="meta")
        self.move = move

    def forward(self, x: Tensor) -> Any:
        return self.move(self, x)


MOVES: dict[str, Callable[[Any, Tensor], Any]] = {
    "to": lambda m, x: x.to(m.weight.device, non_blocking=True) @ m.weight,
    "to another dtype": lambda m, x: x.to(m.weight.device, torch.float64) * 2,
    "to like another": lambda m, x: x.to(m.weight) * 2,
    "copy_": lambda m, x: m.kept.copy_(x) * 2,
    "a view of it": lambda m, x: x[:, 1:].to(m.weight.device) * 2,
    "an index": lambda m, x: m.weight[x.long().to(m.weight.device)] if x.is_floating_point() else m.weight[x],
    "in a dict": lambda m, x: {"y": x.to(m.weight.device) * 2},
    "and hands it back": lambda m, x: (x.to(m.weight.device) * 2, x, x[:1]),
}


@pytest.mark.parametrize("idiom", [name for name in MOVES if name != "an index"])
def test_a_cpu_argument_that_is_moved_has_a_static_input_on_the_device(idiom: str) -> None:
    model = sg.wrap(Moves(MOVES[idiom]).eval(), **SETTINGS)
    for _ in range(5):
        given = torch.randn(2, 4)
        result = model(given)
        if idiom == "and hands it back":
            assert result[1] is given
            assert result[2].data_ptr() == given.data_ptr()
    assert (model.graph_stats.captures, model.graph_stats.failures) == (1, {})
    assert model.graph_stats.replays >= 2
    inputs = next(iter(model._graph_runner.builder.inputs_of.values())).inputs["x"]
    assert (inputs.view(2).device.type, inputs.passed(2, 2).device.type) == ("meta", "cpu")


USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "computes": lambda m, x: (x / 255).to(m.weight.device),
    "reads": lambda m, x: x.to(m.weight.device) * x.numpy().max().item(),
    "converts": lambda m, x: x.double().to(m.weight.device),
    "writes": lambda m, x: x.add_(1).to(m.weight.device),
}


@pytest.mark.parametrize("idiom", USES)
def test_a_large_cpu_argument_that_is_used_there_runs_eagerly_and_names_the_line(idiom: str) -> None:
    model = sg.wrap(Moves(USES[idiom]).eval(), **SETTINGS)
    for _ in range(5):
        model(torch.randn(2, 16))
    assert model.graph_stats.captures == 0
    assert model.graph_stats.eager[Reason.WRONG_DEVICE] == 4
    (detail,) = [text for text in str(model.graph_report()).splitlines() if "wrong_device" in text]
    assert "x is on the CPU" in detail


def test_reset_graphs_forgets_that_a_cpu_argument_was_used_on_the_cpu() -> None:
    model = sg.wrap(Moves(USES["computes"]).eval(), **SETTINGS)
    model(torch.randn(2, 16))
    model.move = lambda m, t: t.to("meta") * 2
    model(torch.randn(2, 16))
    assert model.graph_stats.eager[Reason.WRONG_DEVICE] == 1
    model.reset_graphs()
    for _ in range(4):
        model(torch.randn(2, 16))
    assert (model.graph_stats.captures, model.graph_stats.eager[Reason.WRONG_DEVICE]) == (1, 1)


def test_capture_graphs_tries_once_where_what_it_learns_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tries, build = [], GraphBuilder.build
    monkeypatch.setattr(GraphBuilder, "build", lambda *args, **how: (tries.append(1), build(*args, **how))[1])
    model = sg.wrap(Moves(MOVES["to"]).eval(), **SETTINGS)
    model.capture_graphs(torch.randn(2, 4))
    assert (model.graph_stats.captures, len(tries)) == (1, 1)  # each try runs the forward for real


def test_capture_graphs_learns_from_its_warmup_how_cpu_arguments_are_used() -> None:
    class Steps(nn.Module):
        def forward(self, x: Tensor, step: Tensor) -> Tensor:
            return x * step.to(x.device)

    model = sg.wrap(Steps().eval(), **SETTINGS)
    model.capture_graphs(x(), torch.tensor(1.0))
    for value in (1.0, 2.0, 3.0):
        model(x(), torch.tensor(value))
    assert (model.graph_stats.captures, model.graph_stats.replays) == (1, 3)
    used = sg.wrap(Moves(USES["computes"]).eval(), **SETTINGS)
    with pytest.raises(sg.InputError, match="x is on the CPU, and the forward uses it there"):
        used.capture_graphs(torch.randn(2, 16))


class Passed(nn.Module):
    def __init__(self, pick: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.pick = pick

    def forward(self, x: Tensor, step: Tensor) -> Any:
        return x * step[0], self.pick(step)


@pytest.mark.parametrize("pick", [lambda step: step, lambda step: step[1:], lambda step: step.view(2, 1)])
def test_an_output_that_lies_in_a_cpu_argument_lies_in_the_callers(pick: Callable[[Tensor], Any]) -> None:
    model = sg.wrap(Passed(pick).eval(), **SETTINGS)
    for _ in range(5):
        step = torch.tensor([1.0, 2.0])
        found, expected = model(x(), step)[1], pick(step)
        step.fill_(7.0)
        assert torch.equal(found, expected)
        assert found.shape == expected.shape
        assert (found is step) == (expected is step)
    assert model.graph_stats.replays >= 2


class Attends(nn.Module):
    """Moves what it is passed to torch's own attention, which leaves its fast path under a mode of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, device="meta")
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch._C._len_torch_function_stack())
        return x.to("meta") * 2


def test_torchs_attention_runs_under_no_mode_of_functions() -> None:
    model = sg.wrap(Attends().eval(), **SETTINGS)
    model(torch.randn(2, 4))
    assert model.modes == [0]
    other = sg.wrap(
        Moves(lambda m, x: (m.modes.append(torch._C._len_torch_function_stack()), x.to("meta"))[1]).eval(), **SETTINGS
    )
    other.modes = []
    other(torch.randn(2, 4))
    assert other.modes == [1]
