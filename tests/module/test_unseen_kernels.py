"""Kernels that torch's dispatcher does not see, such as Triton's: what they read and write counts all the same."""

from __future__ import annotations

import functools
import gc
import inspect
import types
import weakref
from typing import Any

import pytest
import torch
from run_log import unwatched
from torch import Tensor, nn
from unseen_kernel import JITFunction, launch, stand_in_triton

import simplegraph as sg
from simplegraph import Reason
from simplegraph.device import saved_state
from simplegraph.device.emulator.device import emulator
from simplegraph.program.probes import Run
from simplegraph.program.session import CaptureSession
from tests.module.answers import reasons

WIDTH = 6

pytestmark = [
    pytest.mark.usefixtures("nothing_left_behind"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="emulated kernels; tests/gpu has real ones"),
]


class Writes(nn.Module):
    """Counts in an input, which no operator writes to."""

    def forward(self, x: Tensor, counter: Tensor) -> Tensor:
        y = x * 2
        launch(lambda counter, x: counter.add_(1).add_(x[:, :1]), counter, x)
        return y + counter


class Reads(nn.Module):
    """Adds an attribute and a tensor in a list, which no operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.tables = torch.randn(WIDTH), [torch.randn(WIDTH)]
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        launch(lambda y, table, other: y.add_(table).mul_(other), y, self.table, self.tables[0])
        return y


def wrapped(module: nn.Module, **settings: Any) -> Any:
    return sg.wrap(module.eval(), **{"capture_sizes": [4], "progress": False, "batch_dims": {"x": 0}} | settings)


def serve(model: Any, sizes: list[int]) -> None:
    for size in sizes:
        x, counter = torch.randn(size, WIDTH), torch.zeros(size, 1)
        expected = x[:, :1] + 1
        torch.testing.assert_close(model(x, counter), x * 2 + expected)
        torch.testing.assert_close(counter, expected)


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("upfront", [True, False])
def test_an_input_that_only_such_a_kernel_writes_reaches_the_caller(verify: int, upfront: bool) -> None:
    model = wrapped(Writes(), verify=verify, batch_dims={"x": 0, "counter": 0})
    if upfront:
        assert model.capture_graphs(torch.randn(4, WIDTH), torch.zeros(4, 1)).failed == {}
    serve(model, [4] * 6)
    serve(model, [3, 2, 3, 2, 3])
    assert model.graph_stats.replays >= 5, reasons(model)


def test_inputs_too_large_to_compare_stay_eager_where_such_a_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_state, "_LIMIT_BYTES", 4 * WIDTH * 4 - 1)
    model = wrapped(Writes(), verify=0)
    serve(model, [4] * 4)
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] >= 2
    assert "kernels that torch does not dispatch may write to x" in next(iter(model.graph_stats.failures.values()))
    plain = wrapped(nn.Tanh(), verify=0, batch_dims={})  # every kernel of which is torch's own
    for _ in range(4):
        x = torch.randn(4, WIDTH)
        torch.testing.assert_close(plain(x), x.tanh())
    assert plain.graph_stats.replays >= 2


def test_the_warmup_compares_inputs_where_such_a_kernel_runs() -> None:
    settings = {"capture_sizes": [1], "batch_dims": {"x": 0, "counter": 0}}
    x, counter = torch.randn(1, WIDTH), torch.zeros(1, 1)
    for verify in (0, 1):
        model = wrapped(Writes(), verify=verify, **settings)
        assert model.capture_graphs(x, counter).captured == 1  # the warmup compares
        serve(model, [1] * 5)
        assert model.graph_stats.replays >= 2


@pytest.mark.parametrize("where", ["attribute", "list"])
def test_an_attribute_that_only_such_a_kernel_reads_is_watched_and_kept_alive(where: str) -> None:
    model = wrapped(Reads(), verify=0)
    module = sg.unwrap(model)
    x = torch.randn(4, WIDTH)
    for _ in range(4):
        torch.testing.assert_close(model(x), (x + module.table) * module.tables[0])
    before = model.graph_stats.replays
    assert before >= 2
    if where == "attribute":
        model.table = torch.randn(WIDTH)
    else:
        model.tables[0] = torch.randn(WIDTH)
    gc.collect()
    churned = [torch.full((WIDTH,), float("nan")) for _ in range(50)]
    for _ in range(4):
        torch.testing.assert_close(model(x), (x + module.table) * module.tables[0])
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.replays >= before + 2
    del churned


def test_attributes_are_watched_only_where_such_a_kernel_runs() -> None:
    model = wrapped(Reads(), verify=0)
    x = torch.randn(4, WIDTH)
    sg.unwrap(model).forward = lambda x: x * 2
    for _ in range(5):
        model.last = torch.randn(WIDTH)  # never read
        torch.testing.assert_close(model(x), x * 2)
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.replays >= 3


class Remembers(nn.Module):
    """Adds a table by a kernel of Triton, and remembers its last answer, which no kernel reads.

    Args:
        kernels: Triton's class of kernels.
        given: what else the kernel is passed.
        beside: "before" or "after", where a kernel of another kind runs; "" for nowhere.
    """

    def __init__(self, kernels: type[JITFunction], given: Any = None, beside: str = "") -> None:
        super().__init__()
        self.kernel, self.given, self.beside = kernels(lambda y, table, *_: y.add_(table)), given, beside
        self.table, self.last = torch.randn(WIDTH), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        if self.beside == "before":
            launch(lambda y: y.add_(0), y)
        self.kernel.run(y, self.table, self.given, grid=(4,), BLOCK=16)
        if self.beside == "after":
            launch(lambda y: y.add_(0), y)
        return y


def serve_remembering(model: Any) -> None:
    x = torch.randn(4, WIDTH)
    for _ in range(6):
        found = model(x)
        torch.testing.assert_close(found, x + model.table)
        model.last = found


def test_a_tensor_that_no_kernel_is_passed_may_be_replaced_after_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(Remembers(stand_in_triton(monkeypatch), torch.zeros(2)), verify=0)
    serve_remembering(model)
    assert model.graph_stats.recaptures == 0
    before = model.graph_stats.replays
    assert before >= 4
    model.table = torch.randn(WIDTH)  # which only the kernel is passed
    gc.collect()
    churned = [torch.full((WIDTH,), float("nan")) for _ in range(50)]
    serve_remembering(model)
    assert model.graph_stats.recaptures == 1
    assert model.graph_stats.replays >= before + 4
    del churned


def test_sizes_whose_kernels_read_a_table_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warmup that did not see what Triton's kernels read had every size captured a second time, and observed."""
    module, labels, capture = Remembers(stand_in_triton(monkeypatch)).eval(), [], CaptureSession.capture

    def counted(session: CaptureSession, *args: Any, about: Run, **kwargs: Any) -> Any:
        labels.append(about.label)
        return capture(session, *args, about=about, **kwargs)

    monkeypatch.setattr(CaptureSession, "capture", counted)
    model = sg.wrap(module, capture_sizes=[1, 2, 4, 8], batch_dims={"x": 0}, progress=False)
    model.capture_graphs(torch.randn(8, WIDTH))
    assert labels == ["batch size 8", "batch size 4", "batch size 2", "batch size 1"]
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        torch.testing.assert_close(model(x), x + module.table)


# What a kernel may be passed an address by, beside its tensors.
ADDRESSES = {
    "table of addresses": torch.zeros(2, dtype=torch.int64),
    "bytes of a descriptor": torch.zeros(128, dtype=torch.uint8),
    "a number": 0x7F00_0000_0000,
    "an object": types.SimpleNamespace(base=None),
}


@pytest.mark.parametrize("given", ADDRESSES)
def test_a_kernel_that_may_be_passed_an_address_may_read_every_tensor(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(Remembers(stand_in_triton(monkeypatch), ADDRESSES[given]), verify=0)
    serve_remembering(model)
    assert model.graph_stats.recaptures >= 1
    ours = stand_in_triton(monkeypatch)
    monkeypatch.setattr(ours, "__init__", functools.partialmethod(JITFunction.__init__, module="simplegraph.fused"))
    model = wrapped(Remembers(ours, ADDRESSES[given]), verify=0)
    serve_remembering(model)
    assert model.graph_stats.recaptures == 0


@pytest.mark.parametrize("beside", ["before", "after"])
def test_a_kernel_beside_those_of_triton_may_read_every_tensor(beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(Remembers(stand_in_triton(monkeypatch), beside=beside), verify=0)
    serve_remembering(model)
    assert model.graph_stats.recaptures >= 1


def test_a_launch_by_a_hook_of_another_may_read_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = stand_in_triton(monkeypatch)
    module = Remembers(kernels)

    def hooked(self: Any, y: Tensor, *args: Any, **kwargs: Any) -> None:
        if self is module.kernel:
            kernels(lambda y, *_: y.add_(0)).run(y, torch.zeros(2, dtype=torch.int64), grid=(1,))
        JITFunction.run(self, y, *args, **kwargs)

    monkeypatch.setattr(kernels, "run", hooked)
    model = wrapped(module, verify=0)
    serve_remembering(model)
    assert model.graph_stats.recaptures >= 1


def test_a_tensor_of_a_class_that_names_other_memory_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Tensor):
        def data_ptr(self) -> int:
            return 0

    given = torch.zeros(2).as_subclass(Elsewhere)
    model = wrapped(Remembers(stand_in_triton(monkeypatch), given), verify=0)
    serve_remembering(model)
    assert model.graph_stats.recaptures >= 1


def test_a_tensor_that_a_kernel_has_as_a_default_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = stand_in_triton(monkeypatch)

    def add_default(y: Tensor, table: Tensor) -> None:
        y.add_(table)

    kernel: Any = kernels(add_default)
    table = torch.randn(WIDTH)
    watched, held = weakref.ref(table), unwatched(kernel=kernel)

    class ByDefault(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            held().kernel.run(y, grid=(1,))
            return y

    def run(self: Any, y: Tensor, grid: Any) -> None:
        (_, parameter) = self.signature.parameters.values()
        JITFunction.run(self, y, parameter.default)

    parameters = list(inspect.signature(add_default).parameters.values())
    kernel.signature = inspect.Signature([parameters[0], parameters[1].replace(default=table)])
    del table, parameters
    monkeypatch.setattr(kernels, "run", run)
    model = wrapped(ByDefault(), verify=0)
    x = torch.randn(4, WIDTH)
    expected = x + kernel.signature.parameters["table"].default
    for _ in range(4):
        torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays >= 2
    other = torch.randn(WIDTH)
    parameters = list(kernel.signature.parameters.values())
    kernel.signature = inspect.Signature([parameters[0], parameters[1].replace(default=other)])
    del parameters
    gc.collect()
    assert watched() is not None
    torch.testing.assert_close(model(x), x + other)


@pytest.mark.parametrize("compared", [True, False])
def test_an_input_that_only_a_kernel_of_triton_writes_reaches_the_caller(
    compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = stand_in_triton(monkeypatch)
    if not compared:
        monkeypatch.setattr(saved_state, "_LIMIT_BYTES", 4 * WIDTH * 4 - 1)

    class WritesByTriton(nn.Module):
        def forward(self, x: Tensor, counter: Tensor) -> Tensor:
            y = x * 2
            kernels(lambda counter, x: counter.add_(1).add_(x[:, :1])).run(counter, x, grid=(1,))
            return y + counter

    model = wrapped(WritesByTriton(), verify=0, batch_dims={"x": 0, "counter": 0})
    serve(model, [4] * 6)
    serve(model, [3, 2, 3, 2, 3])
    assert (model.graph_stats.replays >= 5) is compared, reasons(model)
    assert (model.graph_stats.replays == 0) is not compared


COUNTS: dict[str, Tensor] = {}


@pytest.mark.parametrize("where", ["global", "attribute"])
@pytest.mark.parametrize("sizes", [[4] * 6, [4, 4, 3, 3, 2, 3, 2, 3]], ids=["exact", "padded"])
def test_what_such_a_kernel_counts_is_counted_once_a_call(
    where: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof's replays are taken back also where nothing but the launch tells of the memory."""
    kernels = stand_in_triton(monkeypatch)

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = {"calls": torch.zeros(3)} if where == "attribute" else {}

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            kernels(lambda counts: counts.add_(1)).run((self.own or COUNTS)["calls"], grid=(1,))
            return y

    COUNTS["calls"] = torch.zeros(3)
    model = wrapped(Counts(), verify=1)
    for call, size in enumerate(sizes):
        model(torch.randn(size, WIDTH))
        counts = (model.own or COUNTS)["calls"]
        assert counts.tolist() == [call + 1.0] * 3
    assert model.graph_stats.replays >= 2, reasons(model)


def test_work_on_a_stream_that_the_capture_does_not_know_is_never_run_by_a_recording(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU it would run at once, beside the capture, and count twice."""
    device, apart = emulator(), [False]
    is_capturing = device.is_capturing
    monkeypatch.setattr(device, "is_capturing", lambda: not apart[0] and is_capturing())

    class Apart(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            apart[0] = True  # as a stream that nothing waits for is no part of the capture
            try:
                return y + x.abs()
            finally:
                apart[0] = False

    model = wrapped(Apart(), capture_sizes=[2, 3, 4])
    for _ in range(2):
        assert model.capture_graphs(torch.randn(4, WIDTH)).captured == 0
    for size in (4, 3, 2, 4, 3, 2):
        x = torch.randn(size, WIDTH)
        torch.testing.assert_close(model(x), x * 2 + x.abs())
    assert model.graph_stats.replays == 0
    assert "aten.abs.default runs on a stream" in str(model.graph_report())
