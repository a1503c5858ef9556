"""Tensors of a capture that Python keeps, on a real GPU: the allocator finds them; libraries' memory is let be."""

from __future__ import annotations

import collections
import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.errors import CaptureError, EmulatorError
from simplegraph.device.cuda.device import CudaDevice
from simplegraph.device.emulator.device import emulator
from simplegraph.device.protocol import GraphPool
from simplegraph.program.escapes import PythonState
from simplegraph.program.session import CaptureSession
from tests.gpu.captures import MIB, capture
from tests.gpu.modules import captured, mlp
from tests.support.sessions import record

pytestmark = pytest.mark.usefixtures("device_works")

STEPS: list[Tensor] = []
RECENT: collections.deque[Tensor] = collections.deque(maxlen=2)
LAST: Tensor | None = None
LOCAL = threading.local()


class Slots:
    __slots__ = ("hidden",)


SLOTS = Slots()


def in_a_list(y: Tensor) -> None:
    STEPS.append(y)


def in_a_deque(y: Tensor) -> None:
    RECENT.append(y)


def in_a_global(y: Tensor) -> None:
    global LAST
    LAST = y


def in_a_slot(y: Tensor) -> None:
    SLOTS.hidden = y


def in_a_thread_local(y: Tensor) -> None:
    LOCAL.hidden = y


@functools.lru_cache(maxsize=8)
def table(rows: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(rows, device="cuda")[:, None] / 7.0
    return angles.cos(), angles.sin()


def in_a_cache(y: Tensor) -> None:
    table(len(y))


KEEPERS = {
    in_a_list: "the global STEPS of",
    in_a_deque: "the global RECENT of",
    in_a_global: "the global LAST of",
    in_a_slot: "the global SLOTS of",
    in_a_thread_local: "the global LOCAL of",
    in_a_cache: "the cache of table",
}


def forget() -> None:
    global LAST
    STEPS.clear()
    RECENT.clear()
    LAST = None
    SLOTS.hidden = LOCAL.hidden = None  # type: ignore[attr-defined]
    table.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_kept() -> Any:
    forget()
    yield
    forget()


@pytest.mark.parametrize(("keep", "name"), KEEPERS.items(), ids=[keep.__name__ for keep in KEEPERS])
def test_a_kept_tensor_is_refused_by_name_and_nothing_else_is_alive_in_the_pool(
    keep: Callable[[Tensor], None], name: str, cuda: CudaDevice, pool: GraphPool, x: Tensor
) -> None:
    def run() -> Tensor:
        y = x * 2
        keep(y)
        return y

    with CaptureSession(cuda, pool, thorough=True) as session:
        before = record(session, lambda: x + 1, label="batch size 8")
        with pytest.raises(CaptureError, match="a place that the code does not lead to") as error:
            record(session, run, label="batch size 4", probes=[PythonState()])
        assert "undefined" in str(error.value)  # nothing is deleted from places whose former content is not known
        forget()
        state = PythonState([run])
        state.before_captures()
        with pytest.raises(CaptureError, match="exists only inside the graph") as error:
            record(session, run, label="batch size 4", probes=[state])
        assert name in str(error.value)
        assert "undefined" not in str(error.value)
        del error
        forget()
        gc.collect()
        assert cuda.left_alive(pool) == set()
        after = record(session, lambda: x + 3, label="batch size 2")
    for program, added in ((before, 1), (after, 3), (before, 1)):
        program.replay()
        torch.testing.assert_close(program.result(), x + added)


def test_the_allocator_lists_what_a_capture_left_alive_and_nothing_else(cuda: CudaDevice, pool: GraphPool) -> None:
    x, kept = torch.zeros(MIB, device="cuda"), []

    def run() -> Tensor:
        y = x + 1
        kept.append(y * 2)
        return y + kept[0]

    first, output = capture(cuda, pool, run)
    addresses = {output.untyped_storage().data_ptr(), kept[0].untyped_storage().data_ptr()}
    assert cuda.left_alive(pool) == addresses
    output = cuda.borrow(pool, output)
    assert cuda.left_alive(pool) == {kept[0].untyped_storage().data_ptr()}
    second, other = capture(cuda, pool, lambda: (x * 3).sum())
    assert cuda.left_alive(pool) == {other.untyped_storage().data_ptr()}
    del other
    assert cuda.left_alive(pool) == set(), "an earlier capture's memory is not this one's"
    kept.clear()
    assert cuda.left_alive(pool) == set()
    for segment in (first, second):
        segment.replay()
    torch.testing.assert_close(output, x + 3)
    first.reset()
    second.reset()


def test_a_librarys_workspace_that_begins_in_a_capture_is_no_escape(cuda: CudaDevice, pool: GraphPool) -> None:
    a = torch.randn(256, 256, device="cuda")
    a @ a  # the handle itself cannot be made in a capture
    torch._C._cuda_clearCublasWorkspaces()
    with CaptureSession(cuda, pool, thorough=True) as session:
        programs = [record(session, lambda: a @ a, label="batch size 2", probes=[PythonState()]) for _ in range(3)]
    for program in programs:
        program.replay()
        torch.testing.assert_close(program.result(), a @ a)
    for program in programs:
        program.drop()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()


def test_random_numbers_and_empty_segments_leave_nothing_alive(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    with CaptureSession(cuda, pool, thorough=True) as session:
        for run in (lambda: x + torch.rand_like(x), lambda: nn.functional.dropout(x), lambda: x, lambda: x.view(2, 4)):
            record(session, run, label="batch size 8", probes=[PythonState()])
            assert cuda.left_alive(pool) == set()


class Cyclic:
    def __init__(self, y: Tensor) -> None:
        self.y, self.itself = y, self


def test_a_cycle_is_no_escape(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    with CaptureSession(cuda, pool, thorough=False) as session:
        program = record(session, lambda: Cyclic(x * 2).y + 1, label="batch size 8", probes=[PythonState()])
    program.replay()
    torch.testing.assert_close(program.result(), x * 2 + 1)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = table(len(x))
        y = self.l(x)
        return y * cos + y.flip(-1) * sin


def test_a_table_cached_by_size_is_filled_by_a_warmup_and_serves() -> None:
    net = Rotary().cuda().eval()
    model = captured(net, torch.randn(8, 64, device="cuda"), padding=False)
    for rows in (1, 2, 4, 8, 4, 2, 1):
        x = torch.randn(rows, 64, device="cuda")
        torch.testing.assert_close(model(x), net(x))
    assert model.graph_stats.replays == 7


def test_what_a_break_returned_is_refused_where_the_pool_grows_for_each_result() -> None:
    kept: list[Tensor] = []

    @sg.eager_break
    def three(y: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.repeat(1024, 64) * factor for factor in (1, 2, 3))  # 16 MiB each, the allocator's own blocks

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            results = three(x + 1)
            kept[:] = results[-1:]
            return sum(results)[:4]  # type: ignore[index]

    model = sg.wrap(Broken().eval(), capture_sizes=[4], progress=False, mode="piecewise")
    for _ in range(4):
        x = torch.randn(4, 16, device="cuda")
        torch.testing.assert_close(model(x), (x + 1).repeat(1, 64) * 6)
        torch.testing.assert_close(kept[0][:4], (x + 1).repeat(1, 64) * 3)
    assert model.graph_stats.captures == 0
    assert "kept in the closure of" in next(iter(model.graph_stats.failures.values()))


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        global LAST
        LAST = self.l(x) if LAST is None or LAST.shape != x.shape else self.l(x) + LAST / 2
        return LAST


def test_a_module_with_state_in_a_global_goes_on_as_eager() -> None:
    net = Keeps().cuda().eval()
    xs = [torch.randn(4, 64, device="cuda") for _ in range(6)]
    expected = [net(x) for x in xs]
    forget()
    model = sg.wrap(net, capture_sizes=[4], progress=False)
    for x, y in zip(xs, expected, strict=True):
        torch.testing.assert_close(model(x), y)
    assert model.graph_stats.captures == 0
    assert "the global LAST of" in next(iter(model.graph_stats.failures.values()))


def test_the_check_costs_little_where_nothing_escapes(cuda: CudaDevice, pool: GraphPool) -> None:
    weights = [torch.zeros(8, device="cuda") for _ in range(2000)]
    x = torch.zeros(8, device="cuda")
    with CaptureSession(cuda, pool, thorough=True) as session:
        record(session, lambda: x + 1, label="batch size 8")
        started = time.perf_counter()
        for _ in range(100):
            assert cuda.left_alive(pool) == set()
        seconds = (time.perf_counter() - started) / 100
    assert len(weights) == 2000
    assert seconds < 1e-3


def test_piecewise_and_static_outputs_are_untouched() -> None:
    @sg.eager_break
    def attend(q: Tensor, more: dict[str, Tensor]) -> Tensor:
        return q + more["hidden"]

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return attend(y * 2, {"hidden": y}) + 1

    net = Broken().cuda().eval()
    model = captured(net, torch.randn(8, 64, device="cuda"), mode="piecewise", outputs="static")
    for rows in (1, 3, 8):
        x = torch.randn(rows, 64, device="cuda")
        torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-5)
    assert model.graph_stats.replays == 3


def test_the_emulator_refuses_what_is_on_a_gpu_and_leaves_its_memory_alone() -> None:
    device, x = emulator(), torch.ones(1000)
    on_gpu = torch.ones(1000, device="cuda")
    for work in (lambda: x.to("cuda") * 2, lambda: on_gpu + 1, lambda: on_gpu.copy_(x)):
        pool = device.new_pool()
        with device.on_capture_stream(), torch.no_grad():
            device.begin(pool)
            with pytest.raises(EmulatorError, match="emulator c"):
                work()
            device.abandon()
        device.release_pool(pool)
        gc.collect()
    torch.cuda.synchronize()
    assert on_gpu.sum().item() == 1000
