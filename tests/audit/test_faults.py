"""An audit finds and names what is wrong with graphs that others captured; torch's graphs and their memory stand in."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_in_driver import Kernel, pointer
from stand_in_graphs import POOL, DeviceMemory, capture, stand_in_cuda
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base import patches


@pytest.fixture(params=["methods", "hooks"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, DeviceMemory]:
    """Both ways of attaching: torch up to 2.13, and from 2.15 on."""
    return stand_in_cuda(monkeypatch, hooks=request.param == "hooks")


class Layer(nn.Module):
    def __init__(self, memory: DeviceMemory, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(memory.tensor(first))
        self.register_buffer("scale", memory.tensor(first + 1))
        self.cache = [memory.tensor(first + 2)]


class Engine:
    """Serves with one graph, as engines do: a model, a static input and output, and two workspaces."""

    def __init__(self, kind: Any, memory: DeviceMemory) -> None:
        self.memory = memory
        self.model = nn.Sequential(Layer(memory, 0), Layer(memory, 4))
        self.input, self.workspace = memory.tensor(8), memory.tensor(9)
        self.hidden = memory.workspace(10)
        self.graph = kind()
        self.temporary = memory.tensor(11, POOL)
        self.output = memory.tensor(12, POOL)
        first, second = self.model
        capture(
            self.graph,
            ("first", (self.input, first.weight, first.cache[0], self.temporary)),
            ("second", (self.temporary, second.weight, second.scale, second.cache[0], self.workspace)),
            ("library", (self.temporary, self.hidden, self.output)),
        )
        del self.temporary  # its block stays the pool's
        self.graph.replay()


def _freed_workspace(engine: Engine) -> None:
    engine.memory.kept.clear()


def _resized_workspace(engine: Engine) -> None:
    engine.workspace = engine.memory.tensor(20)


def _cloned_weight(engine: Engine) -> None:
    with torch.no_grad():
        engine.model[1].weight.data = engine.memory.tensor(20)


def _moved_cache(engine: Engine) -> None:
    engine.model[0].cache[0] = engine.memory.tensor(20)


def _replaced_buffer(engine: Engine) -> None:
    engine.model[1].scale = engine.memory.tensor(20)


def _taken_output(engine: Engine) -> None:
    engine.output = None
    engine.other = engine.memory.tensor(12, POOL)


def _dropped_pool(engine: Engine) -> None:
    engine.memory.unmap(11)


def _freed_input(engine: Engine) -> None:
    engine.input = None


FAULTS: dict[str, tuple[Callable[[Engine], None], str, int, str, str]] = {
    "freed workspace": (_freed_workspace, "freed", 10, "that no Python object holds", "library"),
    "resized workspace": (_resized_workspace, "freed", 9, "float32[8]", "second of Sequential.1"),
    "weight.data = clone": (_cloned_weight, "stale", 4, "Sequential.1.weight", "second of Sequential.1"),
    "moved cache": (_moved_cache, "stale", 2, "Sequential.0.cache[0]", "first of Sequential.0"),
    "replaced buffer": (_replaced_buffer, "stale", 5, "Sequential.1.scale", "second of Sequential.1"),
    "taken output": (_taken_output, "taken", 12, "float32[8]", "library"),
    "dropped pool": (_dropped_pool, "unmapped", 11, "a graph's pool", "first of Sequential.0"),
    "freed input": (_freed_input, "freed", 8, "float32[8]", "first of Sequential.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_the_next_replay_and_named(
    cuda: tuple[Any, DeviceMemory], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    inject, kind, block, then, kernel = FAULTS[fault]
    with sg.audit(every=1) as audit:
        engine = Engine(*cuda)
        engine.graph.replay()
        assert audit.findings == []
        inject(engine)
        engine.graph.replay()
    (finding,) = audit.findings
    assert (finding.kind, finding.address, finding.kernel) == (kind, engine.memory.address(block), kernel)
    assert then in finding.then
    assert engine.graph.replays == 3  # the program goes on
    assert [record.getMessage() for record in caplog.records] == [f"simplegraph audit: {finding}"]


def test_a_finding_says_where_the_memory_was_allocated_if_torch_knows(cuda: tuple[Any, DeviceMemory]) -> None:
    memory = cuda[1]
    inside = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "linear.py")
    memory.frames[4] = [{"filename": name, "line": 7, "name": "f"} for name in (inside, "/srv/engine.py")]
    with sg.audit(every=1) as audit:
        engine = Engine(*cuda)
        _cloned_weight(engine)
        engine.graph.replay()
    assert [finding.allocated for finding in audit.findings] == ["/srv/engine.py:7"]


def test_memory_given_back_before_the_first_replay_is_found(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit() as audit:
        x = memory.tensor(0)
        graph = capture(kind(), ("scale", (x,)))
        del x
        graph.replay()
    assert [(finding.kind, finding.kernel) for finding in audit.findings] == [("freed", "scale")]


def test_memory_that_another_tensor_has_before_the_first_replay_is_found_by_who_had_it(
    cuda: tuple[Any, DeviceMemory],
) -> None:
    """As where weights are loaded between a capture and the first request."""
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        layer = Layer(memory, 0)
        graph = capture(kind(), ("product", (layer.weight,)))
        layer.weight.data = memory.tensor(20)
        other = memory.tensor(0)
        graph.replay()
    assert [(finding.kind, finding.address) for finding in audit.findings] == [("stale", other.data_ptr())]
    assert "Layer.weight" in audit.findings[0].then


def test_many_graphs_with_one_fault_are_one_finding(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        x = memory.tensor(0)
        graphs = [capture(kind(), ("scale", (x,))) for _ in range(5)]
        for graph in graphs:
            graph.replay()
        del x
        for graph in graphs:
            graph.replay()
    (finding,) = audit.findings
    assert finding.graphs == [1, 2, 3, 4, 5]


def test_every_n_th_replay_is_checked(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit(every=10) as audit:
        x = memory.tensor(0)
        graph = capture(kind(), ("scale", (x,)))
        for _ in range(100):
            graph.replay()
    assert audit.checks == 11  # the first, and every tenth


def test_without_checks_replay_is_torchs_own_again_after_the_first(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    replay = kind.replay
    with sg.audit(every=0) as audit:
        graph = capture(kind(), ("scale", (memory.tensor(0),)))
        graph.replay()
        assert kind.replay is replay
        assert not getattr(kind, "hooks", {}).get("replay_start")
        assert audit.checks == 1


def test_everything_is_put_back(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    before = dict(vars(kind)), patches.installed()
    with sg.audit(every=1):
        capture(kind(), ("scale", (memory.tensor(0),))).replay()
    assert (dict(vars(kind)), patches.installed()) == before
    assert not any(getattr(kind, "hooks", {}).values())


def test_a_graph_that_was_captured_into_while_no_audit_looked_is_not_checked(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    audit = sg.audit(every=1)
    with audit:
        engine = Engine(kind, memory)
    engine.graph.reset()
    engine.model[0].weight.data = memory.tensor(20)
    capture(engine.graph, ("first", (engine.input, engine.model[0].weight)))
    with audit:
        engine.graph.replay()
        assert audit.check() == []


def test_an_audit_that_ends_during_a_capture_leaves_nothing_behind(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may stop it while a capture ends in this one."""
    kind, memory = cuda
    before, patched = dict(vars(kind)), patches.installed()
    audit = sg.audit.start(every=1)
    reading = type(audit._source)._read

    def stops(source: Any, handle: int) -> Any:
        audit.stop()
        return reading(source, handle)

    monkeypatch.setattr(type(audit._source), "_read", stops)
    engine = Engine(kind, memory)
    engine.graph.replay()
    assert audit.checks == 0
    assert patches.installed() == patched
    assert dict(vars(kind)) == before
    assert not any(getattr(kind, "hooks", {}).values())


def test_a_replay_that_an_audit_ends_in_leaves_the_next_one_attached(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, memory = cuda
    patched = patches.installed()
    first = sg.audit.start(every=0)
    check = sg.Audit._check

    def stops(self: sg.Audit, *arguments: Any) -> Any:
        if self is first and sg.Audit.attached is first:
            first.stop()
            second.append(sg.audit.start(every=1))
            kept.append(capture(kind()))
        return check(self, *arguments)

    second: list[sg.Audit] = []
    kept: list[Any] = []
    monkeypatch.setattr(sg.Audit, "_check", stops)
    Engine(kind, memory)
    kept[0].replay()
    assert second[0].checks == 1
    second[0].stop()
    assert patches.installed() == patched


def test_a_graph_that_was_reset_is_not_checked(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        x = memory.tensor(0)
        graph = capture(kind(), ("scale", (x,)))
        graph.replay()
        graph.reset()
        del x
        assert audit.check() == []
    assert [graph.dropped for graph in audit.graphs] == [True]


def test_a_graph_that_is_gone_is_not_checked(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        x = memory.tensor(0)
        graph = capture(kind(), ("scale", (x,)))
        graph.replay()
        del graph, x
        assert audit.check() == []
    assert [graph.dropped for graph in audit.graphs] == [True]


def test_a_graph_that_is_captured_into_again_is_another_one_and_the_first_is_dropped(
    cuda: tuple[Any, DeviceMemory],
) -> None:
    """Engines may keep the object: what the first graph used is nobody's concern from then on."""
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        graph, before = kind(), memory.tensor(0)
        capture(graph, ("first", (before,))).replay()
        after = memory.tensor(1)
        capture(graph, ("second", (after,)))
        assert [each.dropped for each in audit.graphs] == [True, False]
        del before
        graph.replay()
        assert audit.check() == []
        assert [[name for name, _, _ in each.nodes] for each in audit.graphs] == [["first"], ["second"]]
        assert [each.replays for each in audit.graphs] == [1, 1]
        del after
        graph.replay()
    assert [(finding.kind, finding.graphs) for finding in audit.findings] == [("freed", [2])]


def test_the_end_of_a_tensor_is_no_use_of_the_freed_memory_behind_it(cuda: tuple[Any, DeviceMemory]) -> None:
    """Kernels are passed where their data ends, which is where other memory begins."""
    kind, memory = cuda
    behind: Tensor | None = memory.tensor(1)
    behind, x = None, memory.tensor(0)
    with sg.audit(every=1) as audit:
        bounds = capture(kind(), ("library", (x, memory.address(1))))
        bounds.replay()
        assert audit.check() == []
        capture(kind(), ("library", (memory.address(1),))).replay()
    assert [(finding.kind, finding.graphs) for finding in audit.findings] == [("freed", [2])]
    assert behind is None


def test_a_weight_that_is_no_longer_shared_moved_for_one_name_only(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        tied = nn.Module()
        tied.embedding = tied.head = nn.Parameter(memory.tensor(0))
        graph = capture(kind(), ("product", (tied.head,)))
        graph.replay()
        tied.head = nn.Parameter(memory.tensor(1))
        graph.replay()
        assert audit.findings == []
        tied.embedding = nn.Parameter(memory.tensor(2))
        graph.replay()
    assert [finding.kind for finding in audit.findings] == ["stale"]


def test_what_cannot_be_read_is_noted_and_stops_nothing(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        monkeypatch.setattr(kind.driver, "cuGraphGetNodes", lambda *_: 1 // 0)
        graph = capture(kind(), ("scale", (memory.tensor(0),)))
        graph.replay()
    assert graph.replays == 1
    assert list(audit.graphs[0].reading.notes) == ["ZeroDivisionError: integer division or modulo by zero"]


def test_a_driver_without_a_call_is_refused_in_words(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(cuda[0].driver).__mro__[1], "cuFuncGetParamInfo")
    with pytest.raises(sg.ConfigError, match="the CUDA driver has no cuFuncGetParamInfo"):
        sg.audit()


def test_an_error_of_the_audits_own_does_not_stop_the_program(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind, memory = cuda
    with sg.audit(every=1):
        monkeypatch.setattr(memory, "pools", None)
        graph = capture(kind(), ("scale", (memory.address(0),)))
        graph.replay()
    assert graph.replays == 1
    assert "the program goes on" in caplog.text


def test_a_moved_weight_is_found_beside_a_kernel_that_cannot_be_read(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        layer = Layer(memory, 0)
        graph = kind()
        graph.capture_begin()
        unread, scale = Kernel("nvjet", pointer(memory.address(0))), Kernel("scale", pointer(memory.address(1)))
        unread.fill = lambda out: Kernel.fill(unread, out) or setattr(out, "params", None)
        kind.driver.__init__([unread, scale])
        graph.capture_end()
        graph.replay()
        assert audit.findings == []
        layer.weight.data = memory.tensor(8)
        graph.replay()
    (finding,) = audit.findings
    assert (finding.kind, finding.kernel) == ("stale", "a kernel whose parameters cannot be read, such as nvjet,")
    assert "Layer.weight" in finding.then


def test_parameters_in_one_buffer_are_read(cuda: tuple[Any, DeviceMemory]) -> None:
    """As cuBLAS passes them, by `extra` in place of a list."""
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        x = memory.tensor(0)
        packed = Kernel("gemm", pointer(memory.address(1)), pointer(x.data_ptr()))
        extra = (ctypes.c_uint64 * 5)(1, ctypes.addressof(packed.buffer), 2, 0, 0)
        packed.fill = lambda out: (
            Kernel.fill(packed, out),
            setattr(out, "params", None),
            setattr(out, "extra", ctypes.addressof(extra)),
        )
        graph = kind()
        graph.capture_begin()
        kind.driver.__init__([packed])
        graph.capture_end()
        graph.replay()
        del x
        graph.replay()
    assert [(finding.kind, finding.kernel) for finding in audit.findings] == [("freed", "gemm")]


@pytest.mark.parametrize("refused", [False, True], ids=["copied", "not copied"])
def test_a_graph_is_read_from_a_copy_which_is_destroyed_then_or_at_once_if_there_can_be_none(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Graphs with nodes that allocate memory cannot be copied."""
    kind, memory = cuda
    if refused:
        monkeypatch.setattr(kind.driver, "cuGraphClone", lambda *_: 1)
    with sg.audit(every=1) as audit:
        x = memory.tensor(0)
        graph = capture(kind(), ("scale", (x,)))
        assert [bool(nodes) for nodes in kind.driver.copies.values()] == [True] * (not refused)
        graph.replay()
        assert not any(kind.driver.copies.values())
        del x
        graph.replay()
    assert [(finding.kind, finding.kernel) for finding in audit.findings] == [("freed", "scale")]


def test_a_graph_that_is_dropped_before_a_replay_is_read_and_its_copy_destroyed(cuda: tuple[Any, DeviceMemory]) -> None:
    kind, memory = cuda
    with sg.audit() as audit:
        capture(kind(), ("scale", (memory.tensor(0),))).reset()
        assert not any(kind.driver.copies.values())
    (graph,) = audit.graphs
    assert graph.dropped
    assert [name for name, *_ in graph.nodes] == ["scale"]


def test_a_capture_is_not_disturbed_by_the_collector(cuda: tuple[Any, DeviceMemory]) -> None:
    """A graph that it destroyed while another is captured would break that capture."""
    kind, memory = cuda
    collected: list[bool] = []
    copy = kind.driver.cuGraphClone
    kind.driver.cuGraphClone = lambda *each: collected.append(gc.isenabled()) or copy(*each)
    with sg.audit():
        capture(kind(), ("scale", (memory.tensor(0),)))
    assert (set(collected), gc.isenabled()) == ({False}, True)


def test_tensors_that_were_frozen_in_a_capture_are_known_after_it(cuda: tuple[Any, DeviceMemory]) -> None:
    """Engines freeze their objects while they capture, and the collector lists none of those."""
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        layer = Layer(memory, 0)
        gc.freeze()
        try:
            graph = capture(kind(), ("product", (layer.weight,)))
        finally:
            gc.unfreeze()
        graph.replay()
        layer.weight.data = memory.tensor(8)
        graph.replay()
    assert [(finding.kind, finding.kernel) for finding in audit.findings] == [("stale", "product of Layer")]


def test_a_librarys_own_memory_that_is_unmapped_is_found(
    cuda: tuple[Any, DeviceMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, memory = cuda
    mapped = [memory.address(40)]

    def attribute(kind_at: Any, attribute: int, address: Any) -> int:
        kind_at._obj.value = 2  # CU_MEMORYTYPE_DEVICE
        return int(address.value not in mapped)

    monkeypatch.setattr(kind.driver, "cuPointerGetAttribute", attribute)
    with sg.audit(every=1) as audit:
        graph = capture(kind(), ("library", (memory.address(40),)))
        graph.replay()
        assert audit.findings == []
        mapped.clear()
        graph.replay()
    assert [(finding.kind, finding.then) for finding in audit.findings] == [
        ("unmapped", "device memory that torch did not allocate")
    ]


def test_padding_in_a_struct_is_no_address(cuda: tuple[Any, DeviceMemory]) -> None:
    """A word beside a number may be left from anything: only where a tensor begins is it taken for an address."""
    kind, memory = cuda
    with sg.audit(every=1) as audit:
        x: Tensor | None = memory.tensor(0)
        graph = kind()
        graph.capture_begin()
        kind.driver.__init__([Kernel("gemm", pointer(memory.address(0) + 8, 5))])
        graph.capture_end()
        graph.replay()
        x = None
        graph.replay()
    assert (audit.findings, x) == ([], None)


def test_the_log_names_each_finding_once(cuda: tuple[Any, DeviceMemory], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "simplegraph"), sg.audit(every=1):
        engine = Engine(*cuda)
        _freed_input(engine)
        for _ in range(5):
            engine.graph.replay()
    assert len(caplog.records) == 1
