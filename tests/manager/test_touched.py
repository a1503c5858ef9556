"""Graphs are kept or refused for what the driver says that they touch; here a test says it."""

from __future__ import annotations

import json
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import simplegraph as sg
from simplegraph.base.errors import StaleGraphError
from simplegraph.base.reasons import Reason
from simplegraph.device.emulator.arena import EmulatorSegment
from simplegraph.device.protocol import Inventory, MemoryKind, MemorySpan, Touch
from simplegraph.manager import touched

pytestmark = pytest.mark.usefixtures("no_grad")

GONE, STRUCT = 0x7F0000000480, 0x7F0000000900


@pytest.fixture(autouse=True)
def _on_the_emulator(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("tests/gpu/test_cuda_inventory.py asks a driver")


def touch(
    place: MemoryKind,
    address: int = GONE,
    *,
    certain: bool = True,
    node: str = "scale",
    parameter: int = 0,
    number: int = 0,
) -> Touch:
    return Touch(node, address, 0, place, "", certain, parameter, number)


def tell(monkeypatch: pytest.MonkeyPatch, found: Callable[[int], list[Touch]]) -> list[int]:
    """Let the device tell this of the first inventory asked for, the second, ...; return the counts of known memory."""
    asked: list[int] = []

    def inventory(device: Any, pool: Any, segments: Any, known: Any, *, every: bool = False) -> Inventory:
        asked.append(len(known))
        return Inventory(3, found(len(asked)), seconds=1.0)

    monkeypatch.setattr(touched, "take_inventory", inventory)
    return asked


def hide(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, int]:
    """Return a tensor that counts as one on a GPU, as no other does, and its address."""
    hidden = torch.zeros(64)
    address = hidden.data_ptr()

    def memory(tensor: Tensor) -> list[MemorySpan]:
        return [MemorySpan(address, address + 256, "hidden")] if tensor.data_ptr() == address else []

    monkeypatch.setattr(touched, "_memory", memory)
    return hidden, address


def captured(sizes: list[int], module: nn.Module | None = None, **settings: Any) -> Any:
    module = nn.Linear(4, 4) if module is None else module
    model: Any = sg.wrap(module.eval(), capture_sizes=sizes, progress=False, **{"verify": 0, **settings})
    model.capture_graphs(torch.ones(1, 4))
    return model


def test_a_size_that_touches_freed_memory_runs_eagerly_and_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tell(monkeypatch, lambda count: [touch(MemoryKind.FREED)] if count == 1 else [])
    model = captured([1, 2, 4])
    assert len(asked) == 3, "the size in between may do the same"
    x = torch.randn(4, 4)
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    stats = model.graph_stats
    assert stats.eager[Reason.CAPTURE_FAILED] == 1
    assert list(stats.failures) == ["batch size 4"]
    assert "the kernel scale touches memory at 0x7f0000000480 that was given back" in stats.failures["batch size 4"]
    assert sorted(graph.size for graph in stats.graphs.values()) == [1, 2]


@pytest.mark.proofs
@pytest.mark.parametrize("rows", [4, 3])
def test_memory_that_was_freed_after_the_capture_is_found_before_the_first_replay(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    model = captured([2, 4], verify=1)
    tell(monkeypatch, lambda count: [touch(MemoryKind.FREED)])
    replays: list[object] = []
    replay = EmulatorSegment.replay
    monkeypatch.setattr(EmulatorSegment, "replay", lambda self: (replays.append(self), replay(self)))
    x = torch.randn(rows, 4)
    for _ in range(3):
        assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    assert not replays
    assert model.graph_stats.eager[Reason.CAPTURE_FAILED] == 2
    assert [graph.size for graph in model.graph_stats.graphs.values()] == [2]
    assert "the kernel scale touches memory" in model.graph_stats.failures["batch size 4"]


def test_only_the_largest_and_the_smallest_size_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tell(monkeypatch, lambda count: [])
    model = captured([1, 2, 4, 8])
    assert len(asked) == 2
    assert [graph.size for graph in model.graph_stats.graphs.values() if graph.inventory] == [8, 1]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("kernel", ["_ZN2at6native13reduce_kernelEv", "_Z20magma_sgemmEx_kernelv", "nvjet_tst_64x8"])
def test_what_kernels_of_torch_and_its_libraries_leave_unused_is_no_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kernel: str, debug: bool
) -> None:
    left = [touch(MemoryKind.FREED, node=kernel), touch(MemoryKind.FOREIGN, STRUCT, node=kernel)]
    tell(monkeypatch, lambda count: left)
    assert len(captured([2, 4], debug=debug).graph_stats.graphs) == 2
    assert not [record for record in caplog.records if "memory" in record.message]


def test_the_workspace_that_a_copy_or_a_fill_touches_is_no_alarm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tell(monkeypatch, lambda count: [touch(MemoryKind.FOREIGN, node="memset", parameter=-1)])
    assert len(captured([2, 4]).graph_stats.graphs) == 2
    assert not [record for record in caplog.records if "memory" in record.message]


class Repacking(nn.Module):
    """Does something at its second run, which is the capture, as a library packs weights when it first sees them."""

    def __init__(self, repack: Callable[[], object]) -> None:
        super().__init__()
        self.runs, self.repack = 0, repack

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 2:
            self.repack()
        return x * 2


def test_a_weight_that_a_capture_replaced_is_given_back_before_the_driver_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, packed = [torch.ones(4)], torch.zeros(4)
    before = weakref.ref(weights[0])
    found: list[object] = []

    def told(count: int) -> list[Touch]:
        found.append(before())
        return []

    tell(monkeypatch, told)
    captured([4], Repacking(lambda: weights.__setitem__(0, packed)), state_key=lambda module: module.runs > 1)
    assert weights[0] is packed
    assert found == [None]


@pytest.mark.proofs
def test_sizes_in_between_are_read_at_their_first_replay_and_what_they_alone_touch_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, address = hide(monkeypatch)
    asked = tell(monkeypatch, lambda count: [touch(MemoryKind.FOREIGN, address)] if count == 3 else [])
    model = captured([1, 2, 4], verify=1)
    table = model._graph_runner.builder.manager.table
    assert (len(asked), table.foreign) == (2, [])
    for _ in range(5):
        model(torch.randn(2, 4))
    assert len(asked) == 3, "nothing at later replays"
    assert [tensor.data_ptr() for tensor in table.foreign] == [hidden.data_ptr()]
    assert [graph.size for graph in model.graph_stats.graphs.values() if graph.inventory] == [4, 2, 1]


@pytest.mark.parametrize("freed", [False, True])
def test_without_proofs_sizes_in_between_are_read_before_their_first_replay(
    monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    asked = tell(monkeypatch, lambda count: [touch(MemoryKind.FREED)] if freed and count > 2 else [])
    model = captured([1, 2, 4])
    x = torch.randn(2, 4)
    for _ in range(3):
        if freed:
            with pytest.raises(StaleGraphError, match=r"batch size 2 cannot be replayed: the kernel scale touches"):
                model(x)
        else:
            assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    assert len(asked) == (5 if freed else 3)
    assert model.graph_stats.replays == (0 if freed else 3)
    assert torch.equal(model(x[:1]), nn.functional.linear(x[:1], model.weight, model.bias))


def test_an_engines_sizes_in_between_are_read_before_their_first_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tell(monkeypatch, lambda count: [])
    x = torch.randn(4, 4)
    manager = sg.CudaGraphManager(device="cpu", capture_sizes=[1, 2, 4], progress=False)

    def forward(mode: Any, descriptor: Any) -> Tensor:
        return x[: descriptor.num_tokens] * 2

    manager.capture(forward)
    for _ in range(2):
        assert torch.equal(manager.run(manager.dispatch(2), forward), x[:2] * 2)
    assert len(asked) == 3
    kept = weakref.ref(manager.table)
    del manager
    assert kept() is None, "what checks a graph does not keep the table"


def test_its_time_is_shown_beside_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, lambda count: [])
    clock = types.SimpleNamespace(perf_counter=iter((100.0, 3700.0)).__next__)  # an hour from the first to the last
    monkeypatch.setattr(touched, "time", clock)
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False, verify=0)
    summary = model.capture_graphs(torch.ones(1, 4))
    assert summary.parts["inventory"] == 3600.0 > summary.seconds
    assert "3600.000 s to read what they touch)" in str(summary)
    assert "asked what graphs touch for 1.000 s" in str(model.graph_report())


def test_memory_of_no_tensor_is_warned_of_once_and_replayed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tell(monkeypatch, lambda count: [touch(MemoryKind.FOREIGN), touch(MemoryKind.FOREIGN, STRUCT, certain=False)])
    model = captured([2, 4])
    (record,) = [record for record in caplog.records if "belongs to no tensor" in record.message]
    assert "the kernel scale at 0x7f0000000480" in record.message
    model(torch.ones(4, 4))
    assert model.graph_stats.replays == 1


def test_a_tensor_that_only_a_kernel_knows_is_kept_alive_and_known_next_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hidden, address = hide(monkeypatch)
    asked = tell(monkeypatch, lambda count: [touch(MemoryKind.FOREIGN, address + 8)] if count < 3 else [])
    model = captured([2, 4])
    assert asked == [0, 0]
    assert not [record for record in caplog.records if "no tensor" in record.message]
    del hidden
    table = model._graph_runner.builder.manager.table
    assert [tensor.data_ptr() for tensor in table.foreign] == [address]
    table.clear()
    assert not table.foreign


def test_fake_tensors_are_passed_over_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with FakeTensorMode():
            fake = torch.empty(64, device="cuda")
        assert fake.device.type == "cuda"
        assert touched._tensors_at([GONE]) == []
    finally:
        torch.set_warn_always(always)
    assert [str(each.message) for each in recwarn] == []


def test_the_report_shows_what_kernels_touch_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False, verify=0)
    weight = next(model.parameters()).data_ptr()
    told = [
        touch(MemoryKind.KNOWN, weight + 16),
        touch(MemoryKind.POOL),
        touch(MemoryKind.FOREIGN, STRUCT, certain=False),
    ]
    tell(monkeypatch, lambda count: told)
    model.capture_graphs(torch.ones(1, 4))
    assert "touches" not in str(model.graph_report())
    text = str(model.graph_report(pointers=True))
    assert "FULL 2 touches, as 3 nodes tell" in text
    assert f"scale: weight, pool, live memory without a known owner at {STRUCT:#x}?" in text
    (graph,) = json.loads(model.graph_report().to_json())["graphs"]
    assert [each["place"] for each in graph["inventory"]["touches"]] == ["known", "pool", "foreign"]


def test_the_report_shows_what_a_size_in_between_touches_once_it_was_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, lambda count: [touch(MemoryKind.POOL)])
    model = captured([1, 2, 4])
    text = str(model.graph_report(pointers=True))
    assert [size for size in (1, 2, 4) if f"FULL {size} touches" in text] == [1, 4]
    model(torch.ones(2, 4))
    assert "FULL 2 touches, as 3 nodes tell" in str(model.graph_report(pointers=True))


def test_the_report_shows_kernels_by_module_and_what_they_touch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    scale = "_ZN2my5scaleIfEEvPT_PKS1_S4_RKiPKcm"  # my::scale<float>(float*, float const*, float const*, ...)
    weights = [module[0].weight.data_ptr(), module[1].weight.data_ptr(), module[1].bias.data_ptr()]
    told = [
        touch(MemoryKind.POOL, 1, node=scale),
        touch(MemoryKind.KNOWN, weights[0], node=scale, parameter=1),
        touch(MemoryKind.POOL, 2, node="copy from", parameter=-1, number=1),
        touch(MemoryKind.KNOWN, weights[1], node="copy to", parameter=-1, number=1),
        touch(MemoryKind.KNOWN, weights[2], node="fused", number=2),
        touch(MemoryKind.POOL, 3, node="fused", number=2),
    ]
    tell(monkeypatch, lambda count: told)
    text = str(captured([2], module).graph_report(pointers=True))
    assert "\n    0:\n      my::scale: pool, 0.weight\n" in text
    assert "\n    1:\n      copy from: pool\n      copy to: 1.weight\n      fused: 1.bias, pool" in text


def test_where_no_driver_can_be_asked_there_is_no_word_of_it() -> None:
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2, 4], progress=False)
    summary = model.capture_graphs(torch.ones(1, 4))
    for _ in range(3):
        model(torch.randn(4, 4))
    assert model.graph_stats.replays >= 1
    assert "inventory" not in summary.parts
    assert "touch" not in f"{summary}{model.graph_report()}"
    assert "only a GPU's driver can be asked" in str(model.graph_report(pointers=True))
