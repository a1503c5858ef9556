"""An audit of graphs that torch, inductor, tensordict and we capture: faults are found, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.usefixtures("device_works")
ROOT = Path(__file__).parents[2]
WIDTH = 512


@pytest.fixture(autouse=True)
def _audit_stopped() -> Iterator[None]:
    """A test that fails leaves no audit attached."""
    yield
    if sg.Audit.attached is not None:
        sg.Audit.attached.stop()


@triton.jit
def _add_workspace(x, workspace, y, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at, mask=inside) + tl.load(workspace + at % 8, mask=inside), mask=inside)


class Layer(nn.Module):
    """A product, a buffer, a cache in a list, and a workspace that a kernel of Triton's is passed."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.cache = [torch.zeros(WIDTH, device="cuda", dtype=torch.bfloat16)]
        self.workspace = {"now": torch.zeros(3 << 20, device="cuda", dtype=torch.bfloat16)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.product(x) * self.scale + self.cache[0]
        y = torch.empty_like(x)
        _add_workspace[(triton.cdiv(x.numel(), 256),)](x, self.workspace["now"], y, x.numel(), BLOCK=256)
        return y


def model_of(layers: int = 3) -> Any:
    return nn.Sequential(*(Layer() for _ in range(layers))).to("cuda", torch.bfloat16).eval()


class Engine:
    """Captures a model by `torch.cuda.graph`, with static input and output of its own."""

    def __init__(self) -> None:
        self.model: Any = model_of()
        self.input: Any = torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.output: Any = torch.empty_like(self.input)
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                self.run()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph, stream=stream):
                self.run()

    def run(self) -> None:
        torch.add(self.model(self.input * 1), 1, out=self.output)

    def replay(self) -> None:
        self.graph.replay()


def _freed_workspace(engine: Any) -> None:
    engine.model[0].workspace.clear()


def _resized_workspace(engine: Any) -> None:
    engine.model[0].workspace["now"].untyped_storage().resize_(16 << 20)


def _cloned_weight(engine: Any) -> None:
    weight = engine.model[1].product.weight
    weight.data = weight.data.clone()


def _moved_cache(engine: Any) -> None:
    engine.model[1].cache[0] = engine.model[1].cache[0].clone()


def _replaced_buffer(engine: Any) -> None:
    engine.model[2].scale = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16)


def _taken_output(engine: Any) -> None:
    address, shape = engine.output.data_ptr(), engine.output.shape
    engine.output = None
    kept = []
    while not kept or kept[-1].data_ptr() != address:
        kept.append(torch.empty(shape, device="cuda", dtype=torch.bfloat16))
        assert len(kept) < 1000
    engine.other = kept


def _freed_input(engine: Any) -> None:
    engine.input = None


FAULTS: dict[str, tuple[Callable[[Any], None], set[str], str]] = {
    "freed workspace": (_freed_workspace, {"freed", "unmapped"}, "_add_workspace"),
    "resized workspace": (_resized_workspace, {"freed", "unmapped", "stale"}, "_add_workspace"),
    "weight.data = clone": (_cloned_weight, {"stale"}, "Sequential.1.product.weight"),
    "moved cache": (_moved_cache, {"stale"}, "Sequential.1.cache[0]"),
    "replaced buffer": (_replaced_buffer, {"stale"}, "Sequential.2.scale"),
    "taken output": (_taken_output, {"taken"}, "bfloat16[8, 512]"),
    "freed input": (_freed_input, {"freed"}, "bfloat16[8, 512]"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_a_graph_of_torchs(fault: str) -> None:
    inject, kinds, named = FAULTS[fault]
    with sg.audit(every=1) as audit:
        engine = Engine()
        for _ in range(3):
            engine.replay()
        assert audit.findings == []
        inject(engine)
        engine.replay()
        torch.cuda.synchronize()
    assert audit.findings, audit.to_dict()["graphs"]
    assert {finding.kind for finding in audit.findings} <= kinds
    assert any(named in str(finding) for finding in audit.findings), audit.findings


DROPPED = """
import os, torch
import simplegraph as sg
from tests.gpu.test_cuda_audit import Engine
with sg.audit(every=1) as audit:
    engine = Engine()
    engine.replay()
    assert audit.findings == []
    torch.cuda.synchronize()
    torch._C._cuda_releasePool(0, engine.graph.pool())  # once more than is due, as an engine's own books may
    torch.cuda.empty_cache()
    print([finding.kind for finding in audit.check()], flush=True)
os._exit(0)  # the graph's own end would find its pool gone
"""


def test_a_graph_of_a_dropped_pool_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "unmapped" in done.stdout.splitlines()[-1]


def _graphed_callable(engine: Any) -> None:
    """Capture by `make_graphed_callables`."""
    x = torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        engine.call = torch.cuda.make_graphed_callables(engine.model, (x,))
    engine.replay = lambda: engine.call(x)


def _tensordict(engine: Any) -> None:
    tensordict = pytest.importorskip("tensordict.nn")
    x = torch.ones(8, WIDTH, device="cuda", dtype=torch.bfloat16)
    graphed = tensordict.CudaGraphModule(engine.model, warmup=2)

    def replay() -> None:
        with torch.no_grad():
            graphed(x)

    for _ in range(3):
        replay()
    engine.replay = replay


class Holder:
    """What a fault is injected into."""

    model: Any
    replay: Callable[[], object]


WAYS = {"make_graphed_callables": _graphed_callable, "tensordict": _tensordict}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "fault", ["freed workspace", "resized workspace", "weight.data = clone", "moved cache", "replaced buffer"]
)
def test_a_fault_is_found_in_graphs_of_others(way: str, fault: str) -> None:
    inject, kinds, named = FAULTS[fault]
    with sg.audit(every=1) as audit:
        engine = Holder()
        engine.model = model_of().requires_grad_(False)
        WAYS[way](engine)
        for _ in range(3):
            engine.replay()
        assert audit.graphs
        assert audit.findings == []
        inject(engine)
        engine.replay()
        torch.cuda.synchronize()
    assert {finding.kind for finding in audit.findings} <= kinds
    assert any(named in str(finding) for finding in audit.findings), audit.findings


def test_a_freed_workspace_is_found_in_inductors_graph_trees() -> None:
    """Trees record anew if a tensor that they know moved; memory behind a custom operator they do not know."""
    kept = [torch.zeros(3 << 20, device="cuda")]

    class Address:
        dtype, address = torch.float32, kept[0].data_ptr()

        def data_ptr(self) -> int:
            return self.address

    hidden = Address()

    @torch.library.custom_op("simplegraph_audit::hidden", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _add_workspace[(triton.cdiv(x.numel(), 256),)](x, hidden, y, x.numel(), BLOCK=256)
        return y

    operator.register_fake(torch.empty_like)
    product = nn.Linear(64, 64).cuda()
    compiled: Any = torch.compile(lambda x: operator(product(x)).sin(), mode="reduce-overhead")
    x = torch.ones(4, 64, device="cuda")
    with sg.audit(every=1) as audit, torch.no_grad():
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
        assert audit.graphs
        assert audit.findings == []
        product.weight.data = product.weight.data.clone()  # which trees see, and record again
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
        assert [finding for finding in audit.findings if finding.kind != "stale"] == []
        before = len(audit.findings)
        kept.clear()
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x)
        torch.cuda.synchronize()
    assert [finding.kind for finding in audit.findings[before:]] == ["freed"]


# Our own graphs, of eight kinds, show no finding.


def _mlp() -> Any:
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)).cuda().eval()


def _padded() -> None:
    model: Any = sg.wrap(_mlp(), capture_sizes=[2, 4, 8], progress=False)
    model.capture_graphs(torch.ones(8, 64, device="cuda"))
    for rows in (1, 3, 8, 3, 1):
        model(torch.randn(rows, 64, device="cuda"))


def _static() -> None:
    model: Any = sg.wrap(_mlp(), capture_sizes=[4], outputs="static", progress=False)
    for _ in range(5):
        model(torch.randn(4, 64, device="cuda"))


def _piecewise() -> None:
    module = _mlp()
    sg.break_at(module, "2")
    model: Any = sg.wrap(module, capture_sizes=[4], mode="PIECEWISE", progress=False)
    for _ in range(5):
        model(torch.randn(4, 64, device="cuda"))


def _function() -> None:
    graphed: Any = sg.wrap(lambda x: torch.fft.fft(x).abs().cumsum(0), exact_shapes=True, progress=False)
    for _ in range(5):
        graphed(torch.randn(16, 64, device="cuda"))


def _random() -> None:
    graphed: Any = sg.wrap(lambda x: x + torch.rand_like(x), exact_shapes=True, progress=False)
    for _ in range(5):
        graphed(torch.randn(4, 64, device="cuda"))


def _recaptured() -> None:
    module = _mlp()
    model: Any = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(3):
        for _ in range(4):
            model(torch.randn(4, 64, device="cuda"))
        module[0].weight.data = module[0].weight.data.clone()  # guards drop the graph


def _train_step() -> None:
    module = _mlp().train()
    optimizer = torch.optim.AdamW(module.parameters(), capturable=True)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with torch.enable_grad():
        graphed: Any = sg.train_step(step, optimizers=optimizer)
        for _ in range(6):
            graphed(torch.randn(4, 64, device="cuda"))


def _forward_backward() -> None:
    model: Any = sg.wrap(_mlp().train(), training=True, capture_sizes=[4], progress=False)
    with torch.enable_grad():
        for _ in range(6):
            model(torch.randn(4, 64, device="cuda")).sum().backward()


OURS = (_padded, _static, _piecewise, _function, _random, _recaptured, _train_step, _forward_backward)


@pytest.mark.parametrize("ours", OURS)
def test_our_own_graphs_show_no_finding(ours: Callable[[], None]) -> None:
    with sg.audit(every=1) as audit, torch.no_grad():
        ours()
        torch.cuda.synchronize()
    assert audit.graphs
    assert audit.checks
    assert audit.findings == []
    notes = {note for graph in audit.graphs for note in graph.reading.notes}
    assert not [note for note in notes if "Error" in note], notes


# What an audit costs, and what it leaves alone.


def test_answers_are_equal_to_the_bit_and_replay_is_torchs_own() -> None:
    replay = torch.cuda.CUDAGraph.replay
    torch.manual_seed(0)
    plain = Engine()
    with sg.audit(every=0) as audit:
        torch.manual_seed(0)
        audited = Engine()
        audited.replay()
        assert torch.cuda.CUDAGraph.replay is replay
        audited.replay()
    plain.replay()
    assert torch.equal(audited.output, plain.output)
    assert (audit.checks, audit.findings) == (1, [])
    assert torch.cuda.CUDAGraph.replay is replay


def test_nodes_are_named_by_module() -> None:
    with sg.audit(every=1) as audit:
        Engine().replay()
    nodes = audit.graphs[0].nodes
    modules = {module for _, _, module in nodes}
    assert {"Sequential.0", "Sequential.1", "Sequential.2"} <= modules
    print({name for name, _, _ in nodes}, modules, audit.graphs[0].reading.notes)
    assert all(shape for name, shape, _ in audit.graphs[0].nodes if "_add_workspace" in name)


def test_where_memory_was_allocated_is_known_with_torchs_history() -> None:
    torch.cuda.memory._record_memory_history()
    try:
        with sg.audit(every=1) as audit:
            engine = Engine()
            engine.replay()
            _freed_input(engine)
            engine.replay()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert os.path.basename(__file__) in audit.findings[0].allocated


def test_capture_and_checks_cost_little(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(_mlp() for _ in range(32)))
    x = torch.ones(8, 64, device="cuda")
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def capture(count: int) -> tuple[list[Any], float]:
        torch.cuda.synchronize()
        graphs, started = [], time.perf_counter()
        with torch.inference_mode(), torch.cuda.stream(stream):
            for _ in range(count):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                model(x)
                graph.capture_end()
                graphs.append(graph)
        return graphs, time.perf_counter() - started

    with torch.inference_mode(), torch.cuda.stream(stream):
        model(x)
    kept = [capture(4)[0]]  # a pool that lost its last graph cannot be captured into
    plain, audited = [], []
    for _ in range(3):
        graphs, seconds = capture(16)
        kept.append(graphs)
        plain.append(seconds)
        with sg.audit(every=100) as audit:
            graphs, seconds = capture(16)
            kept.append(graphs)
            audited.append(seconds)
            for graph in graphs:
                for _ in range(100):
                    graph.replay()
            torch.cuda.synchronize()
    reading = sum(graph.reading.seconds for graph in audit.graphs)
    nodes = sum(len(graph.reading.nodes) for graph in audit.graphs)
    started = time.perf_counter()
    for audited_graph in audit.graphs:
        audit._check(audited_graph, audit._blocks())
    checked = (time.perf_counter() - started) / len(audit.graphs)
    with capsys.disabled():
        print(
            f"\n16 captures {min(plain):.4f} s, audited {min(audited):.4f} s; reading {reading:.4f} s of {nodes} nodes,"
            f" surveys {audit.survey_seconds:.4f} s; a check {checked * 1e3:.2f} ms"
        )
    assert audit.findings == []
    assert reading / nodes < 100e-6
