"""Wrapped modules on a real GPU: numbers, failures and memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason
from tests.gpu.modules import SIZES, captured, mlp, poison

pytestmark = pytest.mark.usefixtures("device_works")


MIB = 1 << 20


def churn() -> None:
    """Give the allocator every reason to hand out memory that a graph still needs."""
    held = [torch.full((1 << power,), float("nan"), device="cuda") for power in range(6, 25)]
    del held[::2]
    gc.collect()
    torch.cuda.empty_cache()
    held += [torch.full((3 << power,), float("nan"), device="cuda") for power in range(6, 23)]


# Numbers.


def test_every_size_replays_to_eagers_numbers_with_outputs_poisoned_before() -> None:
    module = mlp()
    model = captured(module, torch.randn(2, 64, device="cuda"))
    replays = 0
    for rows in (8, 1, 3, 4, 2, 7, 5, 6, 1, 8):
        x = torch.randn(rows, 64, device="cuda")
        expected = module(x)
        poison(model)
        churn()
        actual = model(x)
        replays += 1
        torch.testing.assert_close(actual, expected)
        assert actual.shape == (rows, 64)
    assert model.graph_stats.replays == replays
    assert not model.graph_stats.eager


def test_outputs_are_the_callers_own_and_outlive_later_replays() -> None:
    module = mlp()
    model = captured(module, torch.randn(2, 64, device="cuda"))
    inputs = [torch.randn(rows, 64, device="cuda") for rows in (8, 8, 3, 1, 3)]
    outputs = [model(x) for x in inputs]
    poison(model)
    for x, actual in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(actual, module(x))


@pytest.mark.parametrize("width", [256, 1024])
def test_a_bf16_stack_is_bit_equal_at_exact_sizes_and_within_rounding_when_padded(width: int) -> None:
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to("cuda", torch.bfloat16).eval()
    reference = copy.deepcopy(module).double()
    model = captured(module, torch.randn(4, width, device="cuda", dtype=torch.bfloat16), capture_sizes=[1, 8, 64, 256])
    for rows in (1, 8, 64, 256):
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        expected = module(x)
        poison(model)
        assert torch.equal(model(x), expected), rows
    for rows in (2, 3, 7, 9, 33, 63, 65, 200, 255):
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        truth, expected = reference(x.double()), module(x)
        poison(model)
        actual = model(x)
        allowed = 2 * (expected - truth).abs().max() + torch.finfo(torch.bfloat16).eps * truth.abs().max()
        assert (actual - truth).abs().max() <= allowed, rows
    assert model.graph_stats.replays == 13


def test_lazy_calls_give_eagers_numbers_at_every_step_of_the_way() -> None:
    module = mlp()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    for rows in (3, 3, 3, 4, 4, 8, 8, 8, 5, 1, 1, 1, 2, 2, 3, 9, 8):
        x = torch.randn(rows, 64, device="cuda")
        torch.testing.assert_close(model(x), module(x))
        churn()
    assert model.graph_stats.captures >= 3
    assert model.graph_stats.eager[Reason.BATCH_TOO_LARGE] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_is_as_eager(dtype: torch.dtype) -> None:
    module = mlp()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    for _ in range(4):
        x = torch.randn(4, 64, device="cuda")
        with torch.autocast("cuda", dtype):
            expected, actual = module(x), model(x)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
        churn()
        torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays > 0


def test_weights_cast_before_the_capture_are_not_freed_under_the_graph() -> None:
    module = mlp()
    x = torch.randn(4, 64, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        module(x)  # fills autocast's cache
        model = captured(module, x)
    churn()
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(model(x), module(x))
    assert model.graph_stats.replays == 1


class KvCache(nn.Module):
    """Keeps what it was given, and attends to all of it: one forward too many or too few shows."""

    def __init__(self, slots: int = 64, width: int = 16) -> None:
        super().__init__()
        self.slots = slots
        self.proj = nn.Linear(width, width)
        self.register_buffer("cache", torch.zeros(slots + 1, width))  # the last row takes padding
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.cache.index_copy_(0, slots, self.cache.index_select(0, slots) * 0.5 + self.proj(x))
        self.steps.add_(1)
        keys = self.cache[: self.slots]
        return torch.softmax(x @ keys.t(), -1) @ keys + self.steps


def test_a_kv_cache_sees_every_call_exactly_once() -> None:
    module = KvCache().to("cuda").eval()
    expected_module = copy.deepcopy(module)
    model = sg.wrap(module, capture_sizes=SIZES, pad_values={"slots": module.slots}, progress=False)
    for turn, rows in enumerate([3, 3, 3, 4, 8, 8, 8, 5, 1, 1, 1, 2, 2, 2, 9, 3, 8, 7]):
        x = torch.randn(rows, 16, device="cuda")
        slots = torch.randperm(module.slots, device="cuda")[:rows]
        expected = expected_module(x, slots)
        if model.graph_manager is not None:
            poison(model)
        torch.testing.assert_close(model(x, slots), expected)
        assert module.steps.item() == turn + 1
        torch.testing.assert_close(module.cache[: module.slots], expected_module.cache[: module.slots])
        churn()
    assert model.graph_stats.replays >= 6


def test_to_the_cpu_and_back_is_never_stale() -> None:
    module = mlp()
    model = sg.wrap(module, capture_sizes=SIZES, batch_dims={"input": 0}, progress=False)
    x = torch.randn(3, 64, device="cuda")
    for place in ("cuda", "cpu", "cuda", "cpu", "cuda"):
        module.to(place)
        for _ in range(5):
            actual = model(x.to(place))
            torch.testing.assert_close(actual, module(x.to(place)))
            assert actual.device.type == place
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(0.01)
    assert model.graph_stats.replays >= 5


def test_a_cpu_tensor_where_cuda_was_captured_is_eagers_error_and_harms_nothing() -> None:
    module = mlp()
    model = captured(module, torch.randn(2, 64, device="cuda"))
    x = torch.randn(3, 64, device="cuda")
    with pytest.raises(RuntimeError, match="device"):
        model(x.cpu())
    assert not model.graph_stats.eager, "it was served by none"
    assert model.graph_stats.raised == 1
    poison(model)
    torch.testing.assert_close(model(x), module(x))
    assert model.graph_stats.replays == 1
    assert model.graph_stats.captures == len(SIZES)


class Mixed(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_one_cpu_tensor_among_cuda_ones_is_eagers_error_and_harms_nothing() -> None:
    model = sg.wrap(Mixed().eval(), capture_sizes=SIZES, progress=False)
    x = torch.randn(3, 4, device="cuda")
    for _ in range(3):
        assert torch.equal(model(x, x), x + x)
    with pytest.raises(RuntimeError, match="device"):
        model(x, x.cpu())
    poison(model)
    assert torch.equal(model(x, x), x + x)
    scale = torch.tensor(2.0)  # eager takes a CPU scalar beside CUDA tensors, and its value may change
    for value in (2.0, 3.0, 4.0, 5.0):
        scale.fill_(value)
        assert torch.equal(model(x, scale), x + value)


# Failures that need real memory, or real streams.


class OutOfMemory(nn.Module):
    """Runs out of memory at one size, and only while captured."""

    def __init__(self, size: int, *, also_eagerly: bool = False) -> None:
        super().__init__()
        self.size, self.also_eagerly = size, also_eagerly
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        if x.shape[0] == self.size and (self.also_eagerly or torch.cuda.is_current_stream_capturing()):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return y * 2


@pytest.mark.parametrize("upfront", [False, True])
def test_out_of_memory_at_the_third_size_leaves_the_other_sizes_graphs(upfront: bool) -> None:
    module = OutOfMemory(2).to("cuda").eval()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    if upfront:
        summary = model.capture_graphs(torch.randn(8, 16, device="cuda"))
        assert [*summary.failed] == ["batch size 2"]
        assert "out of memory" in str(summary.failed["batch size 2"])
        assert "test_cuda_wrapper.py" in str(summary.failed["batch size 2"])
    for _ in range(4):
        for rows in (8, 4, 2, 1):
            x = torch.randn(rows, 16, device="cuda")
            torch.testing.assert_close(model(x), x @ module.weight * 2)
            torch.rand(4, device="cuda")
            churn()
    stats = model.graph_stats
    assert stats.captures == 3
    assert stats.eager[Reason.CAPTURE_FAILED] >= 2
    assert stats.replays >= 4


def test_out_of_memory_in_eager_too_is_torchs_own_error() -> None:
    module = OutOfMemory(2, also_eagerly=True).to("cuda").eval()
    model = captured(module, torch.randn(8, 16, device="cuda"), capture_sizes=[1, 4, 8], padding=False)
    with pytest.raises(torch.OutOfMemoryError):
        model(torch.randn(2, 16, device="cuda"))
    x = torch.randn(4, 16, device="cuda")
    torch.testing.assert_close(model(x), x @ module.weight * 2)
    assert model.graph_stats.replays == 1


class Faulty(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.fault)(x)

    def unjoined(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self.side)
        return y

    def joined(self, x: Tensor) -> Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = x * 2
        torch.cuda.current_stream().wait_stream(self.side)
        return y

    def event_query(self, x: Tensor) -> Tensor:
        event = torch.cuda.Event()
        event.record()
        event.query()
        return x * 2

    def leaves_another_stream_current(self, x: Tensor) -> Tensor:
        y = x * 2
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.set_stream(self.side)
        return y

    def pinned(self, x: Tensor) -> Tensor:
        torch.empty(2 * MIB + x.shape[0], dtype=torch.uint8, pin_memory=True)
        return x * 2

    def nested_graph(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                return x * 2
        return x * 2


@pytest.mark.parametrize(
    ("fault", "captures"),
    [
        ("unjoined", 0),
        ("joined", len(SIZES)),
        ("event_query", 0),
        ("leaves_another_stream_current", None),
        ("pinned", None),  # depends on the release of torch
        ("nested_graph", 0),
    ],
)
def test_whatever_a_forward_does_to_its_capture_the_numbers_are_eagers(fault: str, captures: int | None) -> None:
    model = sg.wrap(Faulty(fault).eval(), capture_sizes=SIZES, progress=False)
    for _ in range(4):
        for rows in (8, 4, 3, 2, 1):
            x = torch.randn(rows, 4, device="cuda")
            assert torch.equal(model(x), x * 2)
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            assert torch.rand(4, device="cuda").max() < 1
    if captures is not None:
        assert model.graph_stats.captures == captures
        assert len(model.graph_stats.failures) == len(SIZES) - captures


# Memory.


@pytest.mark.alone
def test_reset_graphs_gives_the_memory_back() -> None:
    module = mlp(1024)
    example = torch.randn(4, 1024, device="cuda")

    def free() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    model = captured(module, example, capture_sizes=[256, 4096])
    model.reset_graphs()  # what is left now (workspaces, the stream) belongs to the process
    for _ in range(2):
        before = free()
        assert model.capture_graphs(example).failed == {}
        x = torch.randn(200, 1024, device="cuda")
        torch.testing.assert_close(model(x), module(x))
        del x
        taken = before - free()
        assert taken >= 4096 * 1024 * 4, "at least the static input and an output"
        model.reset_graphs()
        assert before - free() <= 8 * MIB
    x = torch.randn(3, 1024, device="cuda")
    torch.testing.assert_close(model(x), module(x))


@pytest.mark.alone
def test_a_deleted_model_gives_the_memory_back() -> None:
    def once() -> int:
        model = captured(mlp(1024), torch.randn(4, 1024, device="cuda"), capture_sizes=[256, 4096])
        model(torch.randn(200, 1024, device="cuda"))
        del model
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    once()
    assert abs(once() - once()) <= 8 * MIB


@pytest.mark.alone
def test_graph_memory_grows_little_with_the_number_of_sizes() -> None:
    module = mlp(1024)
    example = torch.randn(4, 1024, device="cuda")
    one = captured(module, example, capture_sizes=[4096]).graph_stats.graph_bytes
    many = captured(module, example, capture_sizes=[256 * n for n in range(1, 17)]).graph_stats.graph_bytes
    assert one >= 4096 * 1024 * 4
    assert many <= 2 * one


class MovesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.to("cuda"))
        return out


def test_check_takes_what_its_message_says_of_an_input_on_the_cpu() -> None:
    model, x = MovesItself().eval(), torch.randn(5, 64)
    with pytest.raises(sg.InputError, match=r"x is on the CPU: pass x.to\('cuda:0'\)"):
        sg.check(model, x)
    assert sg.check(model, x.to("cuda:0")).capturable
