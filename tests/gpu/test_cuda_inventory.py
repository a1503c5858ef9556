"""The driver tells whose memory kernels of captured graphs touch that no operator of torch's has named."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import simplegraph as sg
from simplegraph.device.kernel_names import launched_by_torch
from simplegraph.device.protocol import Inventory, MemoryKind

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.usefixtures("device_works")


LARGE = 3 << 20  # elements: the allocator gives such a tensor a segment of its own


@triton.jit
def _add_hidden(x, hidden, y, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at, mask=inside) + tl.load(hidden + at % 8, mask=inside), mask=inside)


class Address:
    """An address without the tensor, as a library has it; Triton takes it for one."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        return self.address


class Adding(nn.Module):
    """Adds what is hidden at an address, and does something with it in a capture, once it is read.

    Both are found in `kept`, a list that is no attribute.
    """

    def __init__(self, hidden: Callable[[], Any], then: Callable[[], object] = bool) -> None:
        super().__init__()
        self.hidden, self.then = hidden, then

    def forward(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _add_hidden[(triton.cdiv(x.numel(), 64),)](x, self.hidden(), y, x.numel(), BLOCK=64)
        if torch.cuda.is_current_stream_capturing():
            self.then()
        return y


@pytest.fixture
def kept() -> Iterator[list[Tensor]]:
    """Tensors that only a list holds, all ones."""
    tensors = [torch.ones(LARGE, device="cuda")]
    yield tensors
    tensors.clear()


def captured(module: nn.Module, rows: tuple[int, ...] = (4,), width: int = 8) -> Any:
    model: Any = sg.wrap(module.cuda().eval(), capture_sizes=list(rows), padding=False, progress=False, verify=0)
    model.capture_graphs(torch.ones(1, width, device="cuda"))
    return model


def inventory(model: Any) -> Inventory:
    """All that the one graph touches."""
    model.graph_report(pointers=True)
    (graph,) = model.graph_stats.graphs.values()
    return graph.inventory  # type: ignore[no-any-return]


def refusal(model: Any) -> str:
    failures = list(model.graph_stats.failures.values())
    assert len(failures) == 1, model.graph_report(pointers=True)
    assert not model.graph_stats.graphs
    return str(failures[0])


def test_a_freed_workspace_is_found_before_a_replay(kept: list[Tensor]) -> None:
    address = Address(kept[0])
    model = captured(Adding(lambda: address, kept.clear))
    assert f"_add_hidden touches memory at {address.address:#x} that was given back" in refusal(model)


def test_a_weight_that_was_repacked_elsewhere_is_found(kept: list[Tensor]) -> None:
    address = Address(kept[0])
    packed = torch.ones(LARGE, device="cuda")
    model = captured(Adding(lambda: address, lambda: kept.__setitem__(0, packed)))
    assert "_add_hidden" in refusal(model)


def test_a_tensor_that_was_resized_is_found(kept: list[Tensor]) -> None:
    address = Address(kept[0])
    model = captured(Adding(lambda: address, lambda: kept[0].untyped_storage().resize_(0)))
    assert "_add_hidden" in refusal(model)


@pytest.mark.proofs
def test_a_tensor_that_was_resized_after_the_capture_is_found_before_the_first_replay(kept: list[Tensor]) -> None:
    address, x = Address(kept[0]), torch.randn(4, 8, device="cuda")
    model: Any = sg.wrap(Adding(lambda: address).cuda().eval(), capture_sizes=[4], padding=False, progress=False)
    model.capture_graphs(torch.ones(1, 8, device="cuda"))
    assert len(model.graph_stats.graphs) == 1
    kept[0].untyped_storage().resize_(0)
    model(x)
    assert "_add_hidden" in refusal(model)
    assert model.graph_stats.replays == 0


def test_memory_that_was_unmapped_is_found(kept: list[Tensor]) -> None:
    kept[:] = [torch.ones(64 << 20, device="cuda")]  # 256 MiB: no graph's pool gets as far as its middle again
    captured(Adding(lambda: Address(kept[0])))  # an earlier inventory saw it
    address = Address(kept[0][32 << 20 :])
    kept.clear()
    gc.collect()
    other = torch.ones(8, device="cuda")
    module = Adding(lambda: address if torch.cuda.is_current_stream_capturing() else other)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert "_add_hidden" in refusal(captured(module))


def test_an_address_in_a_closure_is_kept_alive(kept: list[Tensor], caplog: pytest.LogCaptureFixture) -> None:
    address = Address(kept[0])
    model = captured(Adding(lambda: address))
    kept.clear()
    gc.collect()
    torch.zeros(LARGE, device="cuda")  # would get the memory, were it free
    x = torch.randn(4, 8, device="cuda")
    assert torch.equal(model(x), x + 1)
    assert model.graph_stats.replays == 1
    assert not [record for record in caplog.records if "no tensor" in record.message]


def test_an_address_is_looked_up_beside_fake_tensors_without_a_warning(
    kept: list[Tensor], recwarn: pytest.WarningsRecorder
) -> None:
    with FakeTensorMode():
        fake = torch.empty(64, device="cuda")
    assert fake.device.type == "cuda"
    address = Address(kept[0])
    model = captured(Adding(lambda: address))
    kept.clear()
    gc.collect()
    x = torch.randn(4, 8, device="cuda")
    assert torch.equal(model(x), x + 1)
    assert not [each for each in recwarn if "FakeTensor" in str(each.message)]


def test_a_block_of_another_graphs_pool_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    graph, static = torch.cuda.CUDAGraph(), torch.ones(LARGE, device="cuda")
    with torch.cuda.graph(graph):
        other = static + 0
    graph.replay()
    address = Address(other)
    del other
    gc.collect()
    model = captured(Adding(lambda: address), rows=(2, 4))
    (record,) = [record for record in caplog.records if "belongs to no tensor" in record.message]
    assert "_add_hidden" in record.message
    assert len(model.graph_stats.graphs) == 2


def test_a_side_write_of_triton_is_in_the_report() -> None:
    counter = torch.zeros(LARGE, device="cuda")
    module = Adding(lambda: counter)
    model = captured(module)
    certain = [touch for touch in inventory(model).touches if touch.certain and touch.node == "_add_hidden"]
    assert counter.data_ptr() in {touch.address for touch in certain}
    assert len(certain) == 3  # the input, what is hidden and the output
    assert MemoryKind.POOL in {touch.place for touch in certain}


class Block(nn.Module):
    """A block as models have it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)[:, None]
        y = x + self.attention(y, y, y, need_weights=False)[0][:, 0]
        y = y + self.down(nn.functional.gelu(self.up(y)))
        return nn.functional.dropout(y.softmax(-1).cumsum(-1), 0.1, training=True)


def test_a_plain_model_raises_no_alarm_and_all_of_it_is_read(caplog: pytest.LogCaptureFixture) -> None:
    model = captured(nn.Sequential(*(Block() for _ in range(4))), rows=(2, 8), width=64)
    stats = model.graph_stats
    assert (len(stats.graphs), stats.failures) == (2, {})
    left = [touch for graph in stats.graphs.values() for touch in graph.inventory.touches]
    assert [touch for touch in left if not launched_by_torch(touch.node)] == [], "all is accounted for"
    text = str(model.graph_report(pointers=True))
    assert not [record for record in caplog.records if "no tensor" in record.message]
    for graph in stats.graphs.values():
        found = graph.inventory
        assert found.notes == {}
        assert found.nodes == graph.nodes
        assert not found.certain(MemoryKind.FREED)
    touched = {touch.address for graph in stats.graphs.values() for touch in graph.inventory.touches}
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert {name for name, address in weights.items() if address not in touched} == set()
    _, _, layer = text.partition("\n    0.norm:\n")
    assert re.match(r" +at::native::\w*layer_norm\w*: [^;]*\b0\.norm\.weight, 0\.norm\.bias, pool\n", layer)


def test_the_time_of_reading_is_no_part_of_the_captures() -> None:
    model = captured(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(500))))
    model.reset_graphs()  # the first of a process loads what it needs
    summary = model.capture_graphs(torch.ones(1, 8, device="cuda"))
    (graph,) = model.graph_stats.graphs.values()
    found = graph.inventory
    assert found.nodes >= 1000
    print(f"{found.seconds / found.nodes * 1e6:.1f} us a node; at most 15 are wanted")
    assert summary.parts["inventory"] >= found.seconds
    assert "to read what they touch" in str(summary)


@pytest.mark.proofs
def test_a_size_in_between_is_read_before_its_first_replay_and_what_it_alone_touches_lives(kept: list[Tensor]) -> None:
    address, other = Address(kept[0]), torch.ones(LARGE, device="cuda")

    class Sized(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y, hidden = torch.empty_like(x), address if len(x) == 2 else other
            _add_hidden[(triton.cdiv(x.numel(), 64),)](x, hidden, y, x.numel(), BLOCK=64)
            return y

    model: Any = sg.wrap(Sized().eval(), capture_sizes=[1, 2, 4], padding=False, progress=False)
    model.capture_graphs(torch.ones(1, 8, device="cuda"))
    sizes = {graph.size: graph for graph in model.graph_stats.graphs.values()}
    assert model.graph_stats.failures == {}
    assert sizes[2].inventory is None
    x = torch.randn(2, 8, device="cuda")
    assert torch.equal(model(x), x + 1)
    assert sizes[2].inventory is not None
    kept.clear()
    gc.collect()
    torch.zeros(LARGE, device="cuda")  # would get the memory, were it free
    assert torch.equal(model(x), x + 1)
    assert sizes[2].replays >= 1


def test_a_library_that_passes_addresses_of_the_host_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_DEBUG", "1")
    model = captured(nn.Sequential(Block(64), nn.Linear(64, 3, bias=False)), rows=(2, 8), width=64)
    assert model.graph_stats.failures == {}
    assert model.graph_report(pointers=True)  # reads all that they touch
    for graph in model.graph_stats.graphs.values():
        assert graph.inventory.touches
        assert not graph.inventory.certain(MemoryKind.FREED)


def test_a_copy_and_a_fill_are_read() -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.zeros(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.state.copy_(x)
            return self.state.clone().zero_() + x

    found = inventory(captured(Copying()))
    assert {"copy to", "copy from"} <= {touch.node for touch in found.touches}
    assert found.notes == {}
