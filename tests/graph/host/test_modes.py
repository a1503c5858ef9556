"""Treatment of CPU tensors in a warmup and a capture; tensors on the meta device stand for those on a GPU."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from simplegraph.base.errors import HostError
from simplegraph.base.failures import capture_error
from simplegraph.program.breaks.marks import recording_breaks
from simplegraph.program.host_arguments import HostArguments, used_on_cpu
from simplegraph.program.host_modes import HostCapture, HostMode, HostWarmup
from simplegraph.program.observe import MemoryObserver

META = torch.device("meta")

Forward = Callable[[Tensor], Any]


class NoBreaks:
    """A recorder of breaks that meets none."""

    operators: frozenset[Any] = frozenset()


class _Way:
    """How the modes of a test follow a run: alone, or behind an observer, in whose dispatch they are asked."""

    observed = False


@contextlib.contextmanager
def followed(mode: HostMode) -> Iterator[None]:
    observer = MemoryObserver() if _Way.observed else None
    with mode.following(observer), observer or contextlib.nullcontext():
        yield


@pytest.fixture(params=[False, True], ids=["alone", "observed"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Way, "observed", request.param)


def warmed(forward: Forward) -> HostWarmup:
    warmup = HostWarmup(META)
    with followed(warmup):
        forward(torch.empty(3, 4, device=META))
    return warmup


def captured(forward: Forward, warmup: HostWarmup | None = None, name: Any = lambda _: None) -> HostCapture:
    """A capture after a warmup; the copies that it was served are in `served`."""
    warmup = warmup or warmed(forward)
    capture = HostCapture(META, warmup.copies, name)
    with followed(capture):
        forward(torch.empty(3, 4, device=META))
    capture.check_refused()
    return capture


def refused(forward: Forward, warmup: HostWarmup | None = None, name: Any = lambda _: None) -> str:
    with pytest.raises(HostError) as caught:
        captured(forward, warmup, name)
    error = capture_error(caught.value, "batch size 3")
    assert "test_modes.py" in str(error.location)
    return str(error)


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], autouse=True)
def _grad_mode(request: pytest.FixtureRequest) -> Any:
    with request.param():
        yield


CONSTANTS: dict[str, tuple[Forward, int]] = {  # and how many device copies a graph reads
    "a number": (lambda x: torch.tensor(2.0).to(x.device), 1),
    "a list": (lambda x: torch.tensor([1.0, 2.0]).to(x.device), 1),
    "the same twice": (lambda x: [torch.tensor([1, 2]).to(x.device) for _ in range(2)], 1),
    "to another dtype": (lambda x: torch.arange(4).to(x.device, torch.float16), 1),
    "like another tensor": (lambda x: torch.linspace(0, 1, 5).to(x), 1),
    "type_as": (lambda x: torch.arange(4).type_as(x), 1),
    "an index": (lambda x: x[:, torch.tensor([1, 2])], 1),
    "two indices": (lambda x: x[torch.tensor([0, 1]), torch.arange(2)], 1),
    "a mask": (lambda x: x[torch.tensor([True, False, True])], 1),
    "a mask of two dimensions": (lambda x: x[torch.ones(3, 4, dtype=torch.bool)], 2),
    "put": (lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(1.0)), 2),
    "copied into a tensor": (lambda x: x[0].copy_(torch.arange(4)), 1),
    "torch.where": (lambda x: torch.where(x > 0, x, torch.tensor(-1.0)), 1),
    "computed": (lambda x: (torch.arange(4).view(2, 2)[:1] * 2 + 1).to(x.device), 1),
    "written while it is made": (lambda x: torch.zeros(4).index_fill_(0, torch.tensor([1]), 3.0).to(x.device), 1),
    "a number that stays": (lambda x: x * torch.tensor(2.0), 0),
    "read": (lambda x: x * torch.arange(4).sum().item(), 0),
}


@pytest.mark.parametrize("idiom", CONSTANTS)
def test_what_is_made_of_python_data_is_served_from_device_copies(idiom: str) -> None:
    forward, copies = CONSTANTS[idiom]
    capture = captured(forward)
    assert len(capture.served) == copies
    assert all(copy.device == META for copy in capture.served.values())
    assert not capture.reads


def test_a_warmup_runs_as_it_would() -> None:
    results = []
    warmed(lambda x: results.append(torch.ones(3, 4)[torch.tensor([True, False, True])] * torch.tensor(2.0)))
    assert torch.equal(results[0], torch.full((2, 4), 2.0))


@pytest.mark.parametrize("move", [lambda t, x: t.to(x.device), lambda t, x: x[t], lambda t, x: x[0, :1].copy_(t)])
def test_a_value_that_is_not_the_warmups_is_refused(move: Any) -> None:
    values = itertools.count()
    message = refused(lambda x: move(torch.tensor([next(values)]), x))
    assert "tensor of shape (1,) that the forward makes on the CPU has another value" in message


@pytest.mark.parametrize(("now", "then"), [(0.0, -0.0), (1, 1.0), ([1], [1, 1]), (True, 1)])
def test_values_are_compared_to_the_bit_with_dtype_and_shape(now: Any, then: Any) -> None:
    warmup = warmed(lambda x: torch.tensor(then).to(x.device))
    assert "another value" in refused(lambda x: torch.tensor(now).to(x.device), warmup)


def test_not_a_number_equals_itself() -> None:
    assert len(captured(lambda x: torch.tensor([float("nan")]).to(x.device)).served) == 1


def test_what_was_swallowed_is_refused_at_the_end() -> None:
    def forward(x: Tensor) -> Any:
        try:
            x * torch.rand(())
        except HostError:
            return x

    assert "random numbers" in refused(forward)


DRAWS: dict[str, Forward] = {
    "torch.rand": lambda x: torch.rand(()),
    "torch.randperm": lambda x: torch.randperm(4),
    "in place": lambda x: torch.empty(3).uniform_(),
    "like a constant": lambda x: torch.rand_like(torch.ones(2)),
    "with a generator": lambda x: torch.randn(2, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("how", DRAWS)
def test_random_numbers_of_the_cpu_are_refused_before_they_are_drawn(how: str) -> None:
    warmup, state = warmed(DRAWS[how]), torch.get_rng_state()
    assert "random numbers are drawn on the CPU" in refused(DRAWS[how], warmup)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_numbers_of_the_device_are_not() -> None:
    state = torch.get_rng_state()
    capture = captured(lambda x: (torch.rand(3, device=x.device), torch.rand_like(x), x.uniform_()))
    assert not capture.reads
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_of_before_is_not_written() -> None:
    count = torch.zeros((), dtype=torch.long)
    warmup = warmed(lambda x: count.add_(1))
    message = refused(lambda x: count.add_(1), warmup, name=lambda t: "layer.count" if t is count else None)
    assert "layer.count is on the CPU and the forward writes to it (aten.add_)" in message
    assert count.item() == 1  # by the warmup alone


def test_values_of_before_are_noted_once_and_those_that_change_unseen_refused() -> None:
    scale, table = torch.tensor(0.5), torch.from_numpy(numpy.ones(17, dtype="float32"))
    capture = captured(lambda x: (x * scale, x * scale.item(), scale.to(x.device)))
    assert [tensor.data_ptr() for tensor in capture.reads.values()] == [scale.data_ptr()]
    assert len(capture.served) == 1
    assert [tensor.shape for tensor in captured(lambda x: x * table[3]).reads.values()] == [()]
    message = refused(lambda x: x + table.sum().item(), name=lambda _: "table")
    assert "table is on the CPU and has 68 bytes; memory shared with NumPy" in message
    assert "table is on the CPU" in refused(lambda x: table.to(x.device), name=lambda _: "table")


def test_the_places_where_a_tensor_is_split_are_not_seen() -> None:
    """Torch reads them by no operator: a graph keeps those of its capture, see docs/limits.md."""
    places = torch.tensor([1, 3])
    assert not captured(lambda x: torch.tensor_split(x, places, 1)[0]).reads


def test_shapes_of_large_tensors_may_be_used() -> None:
    table = torch.ones(100)
    assert not captured(lambda x: (torch.zeros_like(table, device=x.device), table[:50].shape)).reads


def test_a_large_tensor_whose_version_tells_of_writes_is_noted() -> None:
    with torch.inference_mode(False):
        table = torch.ones(17)
    capture = captured(lambda x: x[0, 0] + table.to(x.device))
    assert [tensor.data_ptr() for tensor in capture.reads.values()] == [table.data_ptr()]
    assert len(capture.served) == 1
    with torch.inference_mode():
        hidden = torch.ones(17)
    assert "has 68 bytes" in refused(lambda x: x[0, 0] + hidden.to(x.device))


def test_weights_that_a_forward_brings_along_take_no_memory_on_the_device() -> None:
    with torch.inference_mode(False):
        tables = [torch.zeros(2 << 20) for _ in range(10)]
        large = torch.zeros((4 << 20) + 1)
    assert not warmed(lambda x: large.to(x.device)).copies
    assert f"has {large.nbytes} bytes, of {16 << 20} at most" in refused(lambda x: large.to(x.device))
    for index, table in enumerate(tables):
        table[0] = index
    assert len(warmed(lambda x: [table.to(x.device) for table in tables]).copies) == 8  # 64 MiB


def test_a_run_without_cpu_tensors_says_so() -> None:
    assert not warmed(lambda x: torch.nn.functional.relu(x + 1) @ torch.ones(4, 2, device=x.device)).met_host
    assert warmed(lambda x: x * torch.tensor(2.0)).met_host


def test_what_runs_inside_a_break_is_left_alone() -> None:
    table, capture = torch.ones(100), HostCapture(META, {})
    with recording_breaks(NoBreaks()), followed(capture):
        with recording_breaks(None):
            table.add_(torch.rand(100))
        assert not capture.met_host
        torch.ones(2)
        assert capture.met_host
    assert not capture.reads


def test_outputs_made_on_the_cpu_are_told_from_those_of_before() -> None:
    scale = torch.tensor(0.5)
    runs: list[tuple[MemoryObserver, list[Tensor]]] = []

    def forward(x: Tensor) -> None:
        with MemoryObserver() as observer:  # asked before the capture's own mode, as captures do
            runs.append((observer, [torch.arange(3) + 1, scale, scale.view(1), x, scale * 2]))

    captured(forward)
    observer, outputs = runs[-1]
    assert [observer.made(leaf) for leaf in outputs] == [True, False, False, False, True]


def test_no_mode_is_advised_to_who_cannot_set_one() -> None:
    class Drawing(torch.nn.Module):
        takes_settings = True

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(())

    drawing = Drawing()
    assert "@simplegraph.eager_break, and set mode='PIECEWISE'" in refused(drawing)
    drawing.takes_settings = False  # as inside graph_generation
    message = refused(drawing)
    assert "Such calls run as they do without graphs." in message
    assert "PIECEWISE" not in message


def _draws(x: Tensor) -> Tensor:
    return x * torch.rand(1)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_refusal_inside_a_scripted_function_is_named_though_torchscript_swallows_it() -> None:
    scripted = torch.jit.script(_draws)
    with pytest.raises(RuntimeError, match="TorchScript interpreter") as caught:
        captured(lambda x: scripted(x))
    message = str(capture_error(caught.value, "batch size 3"))
    assert "random numbers are drawn on the CPU (aten.rand)" in message
    assert "test_modes.py" in message


def fails(x: Tensor) -> None:
    raise ValueError("the forward's own")


def test_torch_is_left_as_it_was_whatever_the_forward_does() -> None:
    captured(CONSTANTS["a list"][0])
    refused(lambda x: x * torch.rand(()))
    for mode in (HostWarmup(META), HostCapture(META, {})):
        with pytest.raises(ValueError, match="the forward's own"), followed(mode):
            fails(torch.empty(3, 4, device=META))
    assert not torch._C._only_lift_cpu_tensors()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_threads_whose_runs_overlap_are_followed_each_and_left_as_they_were() -> None:
    """Torch keeps this switch for each thread; on meta tensors nothing else shows it."""
    lifting, began, ended = torch._C._only_lift_cpu_tensors, threading.Event(), threading.Event()
    other: list[bool] = []

    def overlap() -> None:
        with HostWarmup(META).following():
            other.append(lifting())
            began.set()
            ended.wait(timeout=30)
        other.append(lifting())

    thread = threading.Thread(target=overlap)
    with HostWarmup(META).following():
        thread.start()
        began.wait(timeout=30)
        inside = lifting()
    after = lifting()
    ended.set()
    thread.join()
    assert (inside, after, other) == (True, False, [True, False])


def passed() -> tuple[Tensor, Tensor, HostArguments]:
    """A CPU tensor that a forward is passed, the memory that a capture reads in its place, and both as an argument."""
    given, static, arguments = torch.ones(2, 3), torch.empty(6, device=META), HostArguments()
    arguments.add("x", given, static)
    return given, static, arguments


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.to(META),
        lambda t: t.t()[1:].to(META, torch.float64),
        lambda t: torch.empty(2, 3, device=META).copy_(t),
        lambda t: torch.empty(2, 3, device=META).index_put_((torch.empty(2, dtype=torch.long, device=META),), t),
    ],
)
def test_a_capture_reads_the_static_input_in_place_of_an_argument(move: Callable[[Tensor], Tensor]) -> None:
    given, static, arguments = passed()
    capture = HostCapture(META, {}, arguments=arguments)
    with followed(capture):
        assert move(given).device == META
    capture.check_refused()
    assert (arguments.moved, arguments.read, capture.reads) == ({"x"}, {}, {})
    assert list(map(id, capture.served.values())) == [id(static)]


def test_the_static_input_is_viewed_as_the_argument_was() -> None:
    given, static, arguments = passed()
    view = arguments.on_device(given.t()[1:])
    assert view is not None
    assert (view.shape, view.stride(), view.storage_offset()) == ((2, 2), (1, 3), 1)
    assert view.untyped_storage()._cdata == static.untyped_storage()._cdata
    assert arguments.on_device(given.view(torch.int32)) is None
    assert arguments.on_device(torch.ones(2, 3)) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t.double().to(META),
        lambda t: t.view(torch.int32).to(META),
        lambda t: t.add_(1),
        lambda t: t.sum(),
    ],
)
def test_a_capture_refuses_what_uses_an_argument_on_the_cpu(use: Callable[[Tensor], Any]) -> None:
    given, _, arguments = passed()
    capture = HostCapture(META, {}, arguments=arguments)
    with pytest.raises(HostError, match="x is on the CPU, and the forward uses it there"), followed(capture):
        use(given)
    with pytest.raises(HostError) as caught:
        capture.check_refused()
    assert caught.value.remedy.startswith("Move it first, as in x = x.to(device)")


def test_a_break_may_read_an_argument() -> None:
    given, _, arguments = passed()
    warmup = HostWarmup(META, arguments)
    with recording_breaks(NoBreaks()), followed(warmup), recording_breaks(None):  # type: ignore[arg-type]
        assert given.tolist() == [[1.0] * 3] * 2
    assert arguments.read == {}


def test_a_capture_runs_under_no_mode_of_functions_where_attention_has_no_fast_path() -> None:
    given, _, arguments = passed()
    with followed(HostCapture(META, {}, arguments=arguments)):
        assert not torch.overrides.has_torch_function((given,))


def test_the_remedy_is_code_where_an_argument_has_a_name_in_code() -> None:
    assert used_on_cpu("x", "aten.sum")[1] == "Move it first, as in x = x.to(device), or pass it on the device."
    assert used_on_cpu("batch.x", "aten.sum")[1] == "Move it first, by .to(device), or pass it on the device."
