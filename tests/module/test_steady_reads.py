"""Values that a forward reads back from memory which no run writes: graphs serve, and are never stale."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.constants import WatchedVersion
from simplegraph.base.reasons import Reason
from simplegraph.program.steady_reads import KnownTensors, SteadyReads

ROWS = (3, 1, 4, 2)


class Reads(nn.Module):
    """Computes with what it reads back from its own buffers.

    Args:
        function: of the module and the input.
    """

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(True))
        self.register_buffer("stride", torch.tensor([3]))
        self.register_buffer("scales", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("calls", torch.tensor(0))
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


STEADY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a flag": lambda m, x: x + 1 if m.ready else x - 1,
    "a number": lambda m, x: x * int(m.stride),
    "an item": lambda m, x: x * float(m.scales[1]),
    "derived": lambda m, x: x * float((m.scales * 2 + m.stride).sum()),
    "all of a mask": lambda m, x: x + 1 if bool(m.mask.all()) else x,
    "a maximum": lambda m, x: x[:, : int(m.stride.max())],
    "equal": lambda m, x: x + 1 if torch.equal(m.mask, torch.ones_like(m.mask)) else x,
    "allclose": lambda m, x: x + 1 if torch.allclose(m.scales, m.scales + 1e-9) else x,
    "made here": lambda m, x: x + int(torch.arange(7, device=x.device).max()),
    "like an input": lambda m, x: x + float(torch.ones_like(x[0]).sum()),
    "written here": lambda m, x: x * float(torch.zeros(3, device=x.device).add_(m.scales).sum()),
    "twice": lambda m, x: x * int(m.stride) + int(m.stride),
    "Python data": lambda m, x: x + 1 if (torch.as_tensor(1.0, device=x.device) != 2.0).any() else x,
    "Python data in memory that held data": lambda m, x: x + sum(_one_after(x.sum()) for _ in range(4)),
}


def _one_after(total: Tensor) -> float:
    """Read Python data back that lies where a number lay that was let go."""
    device = total.device
    del total
    return float(torch.as_tensor(1.0, device=device) * 1)


def graphed(device: torch.device, function: Callable[[Any, Tensor], Tensor], **settings: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    plain = Reads(function).to(device).eval()
    return sg.wrap(plain, capture_sizes=[1, 2, 4], progress=False, **settings), plain


def compare(model: Any, plain: nn.Module, device: torch.device, rows: Any = ROWS) -> None:
    for size in rows:
        x = torch.randn(size, 4, device=device)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x) if plain is None else plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("upfront", [False, True], ids=["lazy", "upfront"])
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", STEADY)
def test_what_no_run_writes_is_read_once(device: torch.device, name: str, grad_mode: Any, upfront: bool) -> None:
    model, plain = graphed(device, STEADY[name])
    with grad_mode():
        if upfront:
            model.capture_graphs(torch.randn(4, 4, device=device))
        compare(model, plain, device, ROWS * 4)
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays >= 6


def fills(plain: Any) -> None:
    plain.stride.fill_(5)


def loads(plain: Any) -> None:
    plain.load_state_dict(plain.state_dict() | {"stride": torch.tensor([2])})


def assigns(plain: Any) -> None:
    plain.load_state_dict(plain.state_dict() | {"stride": torch.tensor([2], device=plain.stride.device)}, assign=True)


def replaces(plain: Any) -> None:
    plain.stride = torch.tensor([4], device=plain.stride.device)


def writes_a_view(plain: Any) -> None:
    plain.stride[0] = 7


def writes_and_moves(plain: Any) -> None:
    plain.stride += 1


def sets_data(plain: Any) -> None:
    plain.stride.data = torch.tensor([6], device=plain.stride.device)


@pytest.mark.parametrize(
    "change", [fills, loads, assigns, replaces, writes_a_view, writes_and_moves, sets_data], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("when", ["before the capture", "after it"])
def test_a_value_that_is_written_is_read_again(device: torch.device, change: Any, when: str) -> None:
    model, plain = graphed(device, STEADY["derived"])
    with torch.no_grad():
        compare(model, plain, device, ROWS * 3 if when == "after it" else ROWS[:1])
        change(plain)
        compare(model, plain, device, ROWS * 4)
    assert model.graph_stats.replays >= 6
    assert not model.graph_stats.eager.get(Reason.CAPTURE_FAILED)


def counts_then_reads(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return x * int(m.calls)


def reads_then_counts(m: Any, x: Tensor) -> Tensor:
    number = int(m.calls)
    m.calls += 1
    return x * number


def counts_through_a_view(m: Any, x: Tensor) -> Tensor:
    number = int(m.calls)
    m.calls.view(1).add_(1)
    return x * number


def initialises_itself(m: Any, x: Tensor) -> Tensor:
    if not int(m.calls):
        m.calls.data.copy_(torch.ones_like(m.calls))
        return x - 1
    return x + 1


@pytest.mark.parametrize(
    "function", [counts_then_reads, reads_then_counts, counts_through_a_view], ids=lambda f: f.__name__
)
def test_a_counter_is_data(device: torch.device, function: Any) -> None:
    model, plain = graphed(device, function)
    twin = copy.deepcopy(plain)
    with torch.no_grad():
        compare(model, twin, device, ROWS * 4)
    assert model.graph_stats.replays == 0
    assert torch.equal(plain.calls, twin.calls)


def test_a_module_that_initialises_itself_at_its_first_call_is_served_afterwards(device: torch.device) -> None:
    model, plain = graphed(device, initialises_itself)
    twin = copy.deepcopy(plain)
    with torch.no_grad():
        compare(model, twin, device, ROWS * 4)
    assert torch.equal(plain.calls, twin.calls)
    assert model.graph_stats.replays >= 6


DATA: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "an input": lambda m, x: x * float(x.sum()),
    "an input and a buffer": lambda m, x: x * float((m.scales[0] * x).sum()),
    # Operators that return their argument or a copy, which come whole in inference mode.
    "cast": lambda m, x: x * float((x.sum() > 0).long()),
    "moved": lambda m, x: x * float((x.sum() * 8).to(torch.int32)),
    "of another kind": lambda m, x: x * float(x.sum().double().type_as(x)),
    "made contiguous": lambda m, x: x * float(x.t().contiguous()[0, 0]),
    "flattened": lambda m, x: x * float(x.t().reshape(-1)[0]),
    "an index": lambda m, x: x[:, : (x.sum() > 0).long() + 2],
    "a random number": lambda m, x: x * float(torch.rand(1, device=x.device)),
    "noise on a buffer": lambda m, x: x + float((m.scales + torch.randn_like(m.scales)).sum()),
    "memory that was not written": lambda m, x: x + float(torch.empty(1, device=x.device).isnan().sum() * 0),
}


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", DATA)
def test_data_is_not_frozen(device: torch.device, name: str, grad_mode: Any) -> None:
    model, plain = graphed(device, DATA[name])
    with grad_mode():
        for size in ROWS * 3:
            x = torch.randn(size, 4, device=device)
            torch.manual_seed(size)
            expected = plain(x)
            torch.manual_seed(size)
            torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays == 0


def test_a_buffer_that_is_passed_is_an_argument(device: torch.device) -> None:
    class Passed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0]))

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return x * float(scale)

    plain = Passed().to(device).eval()
    model: Any = sg.wrap(plain, capture_sizes=[2], batch_dims={"scale": None}, progress=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            assert torch.equal(model(x, plain.scale), x * 2)
            assert torch.equal(model(x, torch.tensor([3.0], device=device)), x * 3)


def test_memory_that_the_graph_of_another_module_writes_is_data(device: torch.device) -> None:
    shared = torch.tensor([2.0], device=device)

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", shared)

        def forward(self, x: Tensor) -> Tensor:
            self.scale.copy_(x.mean().reshape(1))
            return x + 1

    class ReadsIt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", shared)

        def forward(self, x: Tensor) -> Tensor:
            return x * float(self.scale)

    writer: Any = sg.wrap(Writes().eval(), capture_sizes=[2], progress=False)
    reader: Any = sg.wrap(ReadsIt().eval(), capture_sizes=[2], progress=False)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            assert torch.equal(reader(x), x * 2)
        assert reader.graph_stats.replays >= 1
        for _ in range(6):
            x = torch.randn(2, 4, device=device)
            writer(x)
            torch.testing.assert_close(reader(x), x * x.mean())
        assert writer.graph_stats.replays >= 3


def test_a_parameter_that_a_captured_step_updates_is_data(device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * float(self.scale)

    plain = Scaled().to(device).eval()
    model: Any = sg.wrap(plain, capture_sizes=[2], progress=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def loss_of(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (plain.scale * x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step: Any = sg.train_step(loss_of, optimizers=optimizer)
    x = torch.full((2, 4), 0.1, device=device)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(x), x * 2)
    for _ in range(6):
        step(x)
        with torch.no_grad():
            torch.testing.assert_close(model(x), x * plain.scale)
    assert step.graph_stats.replays >= 3


@pytest.mark.parametrize("outer", [False, True], ids=["made outside", "inference tensors"])
def test_inference_tensors_have_no_version_and_are_data(device: torch.device, outer: bool) -> None:
    with torch.inference_mode(outer):
        model, plain = graphed(device, STEADY["a number"])
    with torch.inference_mode():
        compare(model, plain, device, ROWS * 3)
        fills(plain)
        compare(model, plain, device, ROWS * 3)
    assert (model.graph_stats.replays == 0) is outer


def test_a_value_that_follows_the_batch_size_is_that_of_its_own_size(device: torch.device) -> None:
    model, plain = graphed(device, lambda m, x: x * float(torch.arange(x.shape[0], device=x.device).max() + m.stride))
    with torch.no_grad():
        compare(model, plain, device, ROWS * 6)


def test_a_replaced_buffer_is_not_kept_alive(device: torch.device) -> None:
    model, plain = graphed(device, STEADY["a number"])
    with torch.no_grad():
        compare(model, plain, device, ROWS * 3)
        alive = weakref.ref(plain.stride)
        replaces(plain)
        gc.collect()
        assert alive() is None
        compare(model, plain, device, ROWS * 3)


def test_two_buffers_in_one_memory_are_data(device: torch.device) -> None:
    model, plain = graphed(device, STEADY["a number"])
    plain.register_buffer("alias", plain.stride.data)  # a write to it raises a version of its own
    with torch.no_grad():
        compare(model, plain, device, ROWS * 2)
        plain.alias.fill_(5)
        compare(model, plain, device, ROWS * 2)


def test_breaks_may_write_what_segments_read(device: torch.device) -> None:
    @sg.eager_break
    def count(m: Any, x: Tensor) -> Tensor:
        m.calls.add_(1)
        return x + 0

    model, plain = graphed(device, lambda m, x: count(m, x) * int(m.calls), mode="PIECEWISE")
    twin = copy.deepcopy(plain)
    with torch.no_grad():
        compare(model, twin, device, (2,) * 12)


def test_what_a_kernel_of_triton_may_write_is_data() -> None:
    device = torch.device("cpu")

    def learnt(launch: bool) -> int:
        zeros = torch.zeros(1)
        reads = SteadyReads(device, KnownTensors(lambda tensor: [zeros], ()))
        full, item = torch.ops.aten.add_.Scalar, torch.ops.aten._local_scalar_dense.default

        def proceed(func: Any, args: Any, kwargs: Any) -> Any:
            return func(*args, **kwargs)

        made = reads.run(proceed, torch.ops.aten.add.Scalar, (zeros, 1), {})
        reads.run(proceed, full, (made, 1), {})
        if launch:
            with reads.launching([made]):
                pass
        reads.run(proceed, item, (made,), {})
        return len(reads.collect_answers())

    assert learnt(launch=False) == 1
    assert learnt(launch=True) == 0


def test_a_version_tells_of_writes_and_ends_with_its_tensor() -> None:
    tensor = torch.zeros(2)
    watched = WatchedVersion(tensor)
    assert watched.is_same()
    tensor[0] = 1
    assert not watched.is_same()
    watched = WatchedVersion(tensor)
    del tensor
    assert not watched.is_same()
    assert watched.tensor is None


def test_a_value_that_changes_now_and_then_ends_graphs_by_its_name(device: torch.device) -> None:
    model, plain = graphed(device, STEADY["a number"])
    with torch.no_grad():
        for value in range(8):
            plain.stride.fill_(value)
            compare(model, plain, device, (2,) * 2)
    assert "stride (written to" in str(model.graph_report())


def test_a_value_that_changes_at_every_call_is_data(device: torch.device) -> None:
    model, plain = graphed(device, STEADY["a number"])
    with torch.no_grad():
        compare(model, plain, device, (2,) * 4)
        for value in range(30):
            plain.stride.fill_(value)
            compare(model, plain, device, (2,))
    assert "x * int(m.stride)" in str(model.graph_report())


def test_no_storage_is_printed_byte_by_byte(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A printed storage lists every byte: a capture of a large one would not end."""
    printed: list[int] = []
    monkeypatch.setattr(torch.UntypedStorage, "__repr__", lambda storage: printed.append(storage.nbytes()) or "storage")

    @sg.eager_break
    def breaks(x: Tensor) -> Tensor:
        return x + 1

    model, plain = graphed(device, lambda m, x: breaks(x * int(m.stride)) * 2, mode="PIECEWISE")
    with torch.inference_mode():
        compare(model, plain, device, ROWS * 4)
    assert model.graph_stats.replays >= 6
    assert printed == []
