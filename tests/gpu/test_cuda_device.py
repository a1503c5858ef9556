"""Capture on a real GPU: who owns pool memory, random numbers, streams."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from simplegraph.device.cuda.device import CudaDevice
from simplegraph.device.protocol import GraphPool
from simplegraph.program.session import CaptureSession
from tests.gpu.captures import MIB, capture, read_item
from tests.support.sessions import record

pytestmark = pytest.mark.usefixtures("device_left_alone")


# Who owns pool memory.


ROWS, COLUMNS = 16, MIB  # 64 MiB of float32 at the largest size


def _forward(x: Tensor) -> Tensor:
    return (x * 2 + 1) * x


def _capture_sizes(cuda: CudaDevice, pool: GraphPool, x: Tensor, *, borrow: bool) -> list[tuple[int, Any, Tensor]]:
    captured: list[tuple[int, Any, Tensor]] = []
    if borrow:
        with CaptureSession(cuda, pool, thorough=True) as session:
            for rows in range(ROWS, 0, -1):
                program = record(session, lambda rows=rows: _forward(x[:rows]), label=f"batch size {rows}")
                captured.append((rows, program, program.outputs[0]))
        return captured
    for rows in range(ROWS, 0, -1):
        segment, output = capture(cuda, pool, lambda rows=rows: _forward(x[:rows]))
        captured.append((rows, segment, output))
    return captured


def test_pool_memory_does_not_grow_with_the_number_of_sizes(cuda: CudaDevice) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    grown = {}
    for borrow in (True, False):
        gc.collect()
        torch.cuda.empty_cache()
        pool = cuda.new_pool()
        before = torch.cuda.memory_reserved()
        captured = _capture_sizes(cuda, pool, x, borrow=borrow)
        grown[borrow] = torch.cuda.memory_reserved() - before
        torch.cuda.synchronize()
        while captured:
            graph = captured.pop()[1]
            graph.drop() if borrow else graph.reset()
        cuda.release_pool(pool)
    largest = x.nbytes
    assert largest <= grown[True] <= 4 * largest
    assert grown[False] >= 7 * largest


def test_borrowed_outputs_hold_right_values_whatever_the_allocator_does(cuda: CudaDevice, pool: GraphPool) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    captured = _capture_sizes(cuda, pool, x, borrow=True)
    sizes = [1 << power for power in range(8, 27, 2)]
    for turn in range(3):
        churned = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(0xFF) for size in sizes]
        churned += [torch.full((ROWS - turn, COLUMNS), float("nan"), device="cuda") for _ in range(4)]
        del churned[::2]
        gc.collect()
        torch.cuda.empty_cache()
        for rows, program, output in (captured, captured[::-1], captured[::3])[turn]:
            x.normal_()
            output.fill_(float("nan"))
            program.replay()
            churned.append(torch.full((rows, COLUMNS), float("nan"), device="cuda"))
            assert torch.equal(output, _forward(x[:rows])), (turn, rows)
        del churned
    for _, program, _ in captured:
        program.drop()


def test_a_borrowed_tensor_is_the_same_memory_and_owns_none_of_it(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    _, output = capture(cuda, pool, lambda: (x * 2).view(2, 4).t()[1:])
    borrowed = cuda.borrow(pool, output)
    assert borrowed.data_ptr() == output.data_ptr()
    assert (borrowed.shape, borrowed.stride(), borrowed.dtype) == (output.shape, output.stride(), output.dtype)
    assert borrowed.storage_offset() == output.storage_offset()
    allocated = torch.cuda.memory_allocated()
    del output
    assert torch.cuda.memory_allocated() < allocated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_every_dtype_can_be_borrowed(cuda: CudaDevice, pool: GraphPool, x: Tensor, dtype: torch.dtype) -> None:
    segment, output = capture(cuda, pool, lambda: x.to(dtype))
    borrowed = cuda.borrow(pool, output)
    segment.replay()
    assert torch.equal(borrowed.to(torch.complex64), x.to(dtype).to(torch.complex64))


def test_in_pool_tells_captured_memory_from_all_other(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    other = cuda.new_pool()
    segment, output = capture(cuda, pool, lambda: x * 2)
    _, elsewhere = capture(cuda, other, lambda: x * 2)
    assert cuda.in_pool(pool, output)
    assert cuda.in_pool(pool, output[3:])
    assert not cuda.in_pool(pool, x)
    assert not cuda.in_pool(pool, elsewhere)
    with pytest.raises(RuntimeError):
        capture(cuda, pool, lambda: read_item(x))
    _, later = capture(cuda, pool, lambda: torch.zeros(8 * MIB, device="cuda"))
    assert cuda.in_pool(pool, later), "a pool goes on after a failed capture"
    assert cuda.in_pool(pool, output), "and still knows what it had before"
    segment.reset()
    cuda.release_pool(other)


@pytest.mark.alone
def test_a_released_pool_gives_its_memory_back(cuda: CudaDevice) -> None:
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    for attempt in range(2):
        gc.collect()
        torch.cuda.empty_cache()
        before, _ = torch.cuda.mem_get_info()
        pool = cuda.new_pool()
        captured = _capture_sizes(cuda, pool, x, borrow=True)
        torch.cuda.synchronize()
        while captured:
            captured.pop()[1].drop()
        cuda.release_pool(pool)
        torch.cuda.empty_cache()
        after, _ = torch.cuda.mem_get_info()
        if attempt:  # the first round also pays for what the process keeps
            assert before - after <= 8 * MIB


# Random numbers.


def _two_draws(x: Tensor) -> Tensor:
    return F.dropout(x + 1, 0.5) + torch.rand_like(x)


def test_replays_draw_the_numbers_that_eager_would(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    segment, output = capture(cuda, pool, lambda: _two_draws(x))
    torch.manual_seed(21)
    expected = [_two_draws(x) for _ in range(3)] + [torch.rand(8, device="cuda")]
    torch.manual_seed(21)
    actual = []
    for _ in range(3):
        output.fill_(float("nan"))
        segment.replay()
        actual.append(output.clone())
    actual.append(torch.rand(8, device="cuda"))
    assert len({tuple(value.tolist()) for value in expected}) == 4
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_capturing_draws_no_numbers(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    torch.manual_seed(22)
    expected = torch.rand(8, device="cuda")
    torch.manual_seed(22)
    capture(cuda, pool, lambda: _two_draws(x))
    assert torch.equal(torch.rand(8, device="cuda"), expected)


def test_a_registered_generator_advances_with_every_replay(cuda: CudaDevice, pool: GraphPool) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    segment, output = capture(cuda, pool, lambda: torch.rand(8, device="cuda", generator=generator), (generator,))
    reference = torch.Generator("cuda").manual_seed(1)
    for _ in range(3):
        segment.replay()
        assert torch.equal(output, torch.rand(8, device="cuda", generator=reference))
    assert torch.equal(
        torch.rand(8, device="cuda", generator=generator), torch.rand(8, device="cuda", generator=reference)
    )


# Streams and threads.


def test_wait_for_orders_replays_on_two_streams(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    def slow() -> Tensor:
        y = x * 2
        torch.cuda._sleep(2_000_000)  # about a millisecond in which a racing stream would overwrite x
        return y + x

    segment, output = capture(cuda, pool, slow)
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    previous = cuda.current_stream()
    results = []
    torch.cuda.synchronize()
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 3]):
            cuda.wait_for(previous)
            previous = cuda.current_stream()
            x.fill_(float(turn))
            output.fill_(float("nan"))
            segment.replay()
            results.append(output.clone())
    torch.cuda.synchronize()
    assert [result.unique().tolist() for result in results] == [[3.0 * turn] for turn in range(12)]


def test_the_capture_stream_runs_after_and_before_the_callers(cuda: CudaDevice) -> None:
    x = torch.zeros(8, device="cuda")
    torch.cuda._sleep(5_000_000)
    x.fill_(4)
    with cuda.on_capture_stream():
        torch.cuda._sleep(5_000_000)
        y = x * 2
    assert (y + x).tolist() == [12.0] * 8


def test_other_threads_use_the_device_while_one_captures(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    stop, started, errors = threading.Event(), threading.Event(), []
    rounds = 0

    def work() -> None:
        nonlocal rounds
        try:
            weight = torch.eye(256, device="cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                while not stop.is_set() or rounds < 3:
                    values = torch.full((256, 256), float(rounds % 16), device="cuda") @ weight
                    assert values.sum().item() == rounds % 16 * 256 * 256
                    rounds += 1
                    started.set()
        except BaseException as error:
            errors.append(error)
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    try:
        for factor in range(1, 41):
            segment, output = capture(cuda, pool, lambda factor=factor: (x * factor).add_(torch.ones(8, device="cuda")))
            output.fill_(float("nan"))
            segment.replay()
            assert output.tolist() == [value * factor + 1.0 for value in range(8)]
    finally:
        stop.set()
        thread.join(30)
    assert errors == []
    assert rounds >= 3


def test_nodes_and_memory_are_reported(cuda: CudaDevice, pool: GraphPool, x: Tensor) -> None:
    with CaptureSession(cuda, pool, thorough=True) as session:
        program = record(session, lambda: torch.zeros(64 * MIB, device="cuda") + x[0], label="batch size 8")
    assert program.bytes >= 256 * MIB
    assert program.seconds > 0
    assert 0 < cuda.free_memory() < torch.cuda.get_device_properties(cuda.torch_device).total_memory
    assert torch.cuda.memory_reserved(cuda.torch_device) >= 256 * MIB
    program.drop()
