"""What becomes of graphs for what the driver says that they touch; here a test says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.graph.emulator import EmulatorDevice, EmulatorSegment
from simplegraph.graph.inventory import Inventory, KnownMemory, MemoryKind, Touch
from simplegraph.manager import touched
from simplegraph.reasons import Reason

pytestmark = pytest.mark.usefixtures("no_grad")

GONE, STRUCT = 0x7F0000000480, 0x7F0000000900


@pytest.fixture(autouse=True)
def _on_the_emulator(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("tests/gpu/test_cuda_inventory.py asks a driver")


def touch(place: MemoryKind, address: int = GONE, *, certain: bool = True, node: str = "scale") -> Touch:
    return Touch(node, address, 0, place, "", certain)


def tell(monkeypatch: pytest.MonkeyPatch, found: Callable[[int], list[Touch]]) -> list[int]:
    """Let the device tell this of the first inventory asked for, the second, ...; return the counts of known memory."""
    asked: list[int] = []

    def inventory(self: Any, pool: Any, segments: Any, known: Any) -> Inventory:
        asked.append(len(known))
        return Inventory(3, found(len(asked)))

    monkeypatch.setattr(EmulatorDevice, "inventory", inventory)
    return asked


def captured(sizes: list[int]) -> Any:
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=sizes, progress=False, debug=True, verify=0)
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
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2, 4], progress=False, debug=True)
    model.capture_graphs(torch.ones(1, 4))
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


@pytest.mark.parametrize(("in_both", "captures"), [(False, 2), (True, 0)])
def test_a_word_of_a_struct_counts_where_both_graphs_have_it(
    monkeypatch: pytest.MonkeyPatch, in_both: bool, captures: int
) -> None:
    padding = touch(MemoryKind.FREED, certain=False)
    tell(monkeypatch, lambda count: [padding] if in_both or count == 1 else [])
    assert len(captured([2, 4]).graph_stats.graphs) == captures


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
    hidden = torch.zeros(64)
    address = hidden.data_ptr()

    def memory(tensor: Tensor) -> list[KnownMemory]:  # as of tensors on a GPU
        return [KnownMemory(address, address + 256, "hidden")] if tensor.data_ptr() == address else []

    monkeypatch.setattr(touched, "_memory", memory)
    asked = tell(monkeypatch, lambda count: [touch(MemoryKind.FOREIGN, address + 8)] if count < 3 else [])
    model = captured([2, 4])
    assert asked == [0, 0]
    assert not [record for record in caplog.records if "no tensor" in record.message]
    del hidden
    table = model._graph_runner.builder.manager.table
    assert [tensor.data_ptr() for tensor in table.foreign] == [address]
    table.clear()
    assert not table.foreign


def test_the_report_shows_what_kernels_touch_where_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2], progress=False, debug=True, verify=0)
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
    assert f"scale: weight, pool, live memory that nobody accounts for at {STRUCT:#x}?" in text
    (graph,) = json.loads(model.graph_report().to_json())["graphs"]
    assert [each["place"] for each in graph["inventory"]["touches"]] == ["known", "pool", "foreign"]


def test_no_graph_is_asked_about_without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tell(monkeypatch, lambda count: [touch(MemoryKind.FREED)])
    model: Any = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2, 4], progress=False)
    model.capture_graphs(torch.ones(1, 4))
    for _ in range(3):
        model(torch.randn(4, 4))
    assert asked == []
    assert model.graph_stats.replays >= 1
    assert "capture with debug=True on a GPU" in str(model.graph_report(pointers=True))
