"""Arms: a wrong one must not get a time, and one that fails must not take the others with it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import simplegraph as sg
from bench.arms import ARMS, compiled, load_arm, plain_loop
from bench.arms.base import NotAvailable, Setup, fill, padded_size
from bench.arms.compiled_piecewise import CompiledPiecewise
from bench.arms.correctness import Mismatch, compare_with_eager, counts_to_compare
from bench.arms.eager import Eager
from bench.models import attention
from bench.models.workload import Workload
from bench.startup import runs
from bench.tools import pieces
from bench.tools.measure import Timeline
from bench.tools.pieces import is_attention, split_at_attention

CPU = torch.device("cpu")
TINY = Workload("tiny", (1, 2, 4), CPU)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(TINY.build(), TINY)


class Wrong(Eager):
    """Off by a little more than rounding."""

    name = "wrong"

    def __call__(self, *batch: Tensor) -> Tensor:
        return super().__call__(*batch) * 1.001


def test_an_arm_that_computes_something_else_gets_no_time(setup: Setup) -> None:
    with pytest.raises(Mismatch, match=r"wrong: batch 1 differs from eager by 1\.00e-03"):
        compare_with_eager(Wrong(setup), setup, [1, 2])


def test_an_arm_that_gives_nan_gets_no_time(setup: Setup) -> None:
    class Nan(Wrong):
        def __call__(self, *batch: Tensor) -> Tensor:
            return super().__call__(*batch) * float("nan")

    with pytest.raises(Mismatch, match="nan"):
        compare_with_eager(Nan(setup), setup, [1])


def test_eager_equals_itself_on_full_and_mixed_contexts(setup: Setup) -> None:
    comparisons = compare_with_eager(Eager(setup), setup, [1, 3])
    assert [(one.count, one.captured, one.equal) for one in comparisons] == [
        (1, True, True),
        (1, True, True),
        (3, False, True),
        (3, False, True),
    ]


def test_padded_batches_are_compared_too() -> None:
    assert counts_to_compare([1, 2, 4, 8, 16]) == [1, 3, 4, 15, 16]


@pytest.mark.parametrize("name", ["plain-loop", "lean-loop"])
def test_arms_that_need_a_gpu_say_so(name: str) -> None:
    with pytest.raises(NotAvailable, match="needs a GPU"):
        load_arm(name).check_available(CPU)


def test_a_cpu_without_a_compiler_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "CPP_COMPILERS", ("no-such-compiler",))
    with pytest.raises(NotAvailable, match=r"needs a C\+\+ compiler"):
        CompiledPiecewise.check_available(CPU)


def test_an_unknown_arm_says_which_there_are() -> None:
    with pytest.raises(KeyError, match="eager"):
        load_arm("nothing")


def test_static_inputs_are_padded_with_rows_that_touch_nothing(setup: Setup) -> None:
    static = tuple(torch.full_like(tensor, 9) for tensor in setup.batch(4))
    batch = setup.batch(3)
    fill(static, batch)
    assert all(torch.equal(buffer[:3], tensor) for buffer, tensor in zip(static, batch, strict=True))
    assert [int(buffer[3].flatten()[0]) for buffer in static] == [0, 0, -1, 0, 0]


def test_the_smallest_size_that_fits_is_taken() -> None:
    assert [padded_size([1, 2, 4], count) for count in (1, 3, 4)] == [1, 4, 4]
    with pytest.raises(ValueError, match="5 requests is above the largest size, 4"):
        padded_size([1, 2, 4], 5)


def test_the_split_gives_each_attention_a_part_of_its_own(setup: Setup) -> None:
    parts: list[list[bool]] = []

    def split(traced: fx.GraphModule, _: list[Any]) -> fx.GraphModule:
        whole = split_at_attention(traced)
        pieces = [part for part in whole.children() if isinstance(part, fx.GraphModule)]
        parts.extend([is_attention(node) for node in part.graph.nodes if node.op == "call_function"] for part in pieces)
        return whole

    batch = setup.batch(2)
    compiled = torch.compile(setup.model, fullgraph=True, backend=split)
    torch.testing.assert_close(compiled(*batch), setup.model(*batch))
    layers = setup.model.config.num_hidden_layers
    assert [any(part) for part in parts] == [False, True] * layers + [False]
    assert [part for part in parts if any(part)] == [[True]] * layers


class RunAgain:
    """Stands in for a capture: a replay runs the call again and writes where the first one wrote."""

    graphs = 0

    def __init__(self, function: Callable[..., Any] = lambda: None, args: tuple[Any, ...] = ()) -> None:
        self.function, self.args, self.result = function, args, function(*args)

    def replay(self) -> None:
        for old, new in zip(tensors(self.result), tensors(self.function(*self.args)), strict=True):
            old.copy_(new)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        yield

    on_stream = session

    def capture(self, function: Callable[..., Any], *args: Any) -> tuple[RunAgain, Any]:
        graph = RunAgain(function, args)
        return graph, graph.result


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def test_piecewise_replays_pieces_and_attention_in_order(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "compile_piece", lambda piece, fakes: piece)
    arm = CompiledPiecewise(setup)
    arm._lean = RunAgain()
    arm.start(setup.batch(1), Timeline(CPU))
    assert len(arm._replays) == len(setup.sizes)
    compare_with_eager(arm, setup, counts_to_compare(sorted(setup.sizes)))
    steps = arm._replays[1]._steps
    assert len(steps) == 2 * setup.model.config.num_hidden_layers + 1


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: Stream) -> None: ...

    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))


@pytest.mark.usefixtures("no_gpu_needed")
def test_the_lean_loop_warms_up_once_and_replays_every_size(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, calls = setup.model.forward, []

    def counted(*batch: Tensor) -> Tensor:
        calls.append(len(batch[0]))
        return forward(*batch)

    monkeypatch.setattr(plain_loop, "LeanCapture", RunAgain)
    monkeypatch.setattr(setup.model, "forward", counted)
    arm = plain_loop.LeanLoop(setup)
    arm.start(setup.batch(1), Timeline(CPU))
    assert calls == [4, 4, 2, 1, 1]  # a warmup, a capture of each size, and a replay
    monkeypatch.undo()
    compare_with_eager(arm, setup, counts_to_compare(sorted(setup.sizes)))
    assert set(arm.details()["parts_s"]) == {"first warmup", "captures"}


def test_our_piecewise_graphs_are_eager_to_the_bit(setup: Setup) -> None:
    arm = load_arm("simplegraph-piecewise")(setup)
    arm.start(setup.batch(1), Timeline(CPU))
    comparisons = compare_with_eager(arm, setup, counts_to_compare(sorted(setup.sizes)))
    assert all(one.equal for one in comparisons if one.captured)
    assert all(one.padded_equal for one in comparisons), "eager on the padded batch runs the kernels that graphs replay"
    assert any(not one.captured for one in comparisons)
    assert arm.details()["segments"] == [setup.model.config.num_hidden_layers + 1]


def test_attention_goes_where_it_is_routed_and_back(setup: Setup) -> None:
    calls: list[int] = []

    def note(*args: Any) -> None:
        calls.append(args[0].shape[0])
        attention.paged_attention(*args)

    batch = setup.batch(2)
    with attention.routed(note):
        routed = setup.model(*batch)
    assert calls == [2, 2]
    assert torch.equal(setup.model(*batch), routed)
    assert calls == [2, 2]


def plan(**settings: Any) -> runs.StartupPlan:
    return runs.StartupPlan(**{"model": "tiny", "sizes": (1, 2), "device": "cpu", "steps": 1} | settings)


def test_an_arm_s_process_returns_its_figures(tmp_path: Path) -> None:
    figures = runs.measure(runs.Run("eager"), plan(), runs.CompileCaches(tmp_path))
    assert (figures["arm"], figures["status"]) == ("eager", "ok")
    assert 0 < figures["seconds"]["first_output"] <= figures["seconds"]["ready"]
    assert set(figures["step_ms"]) == {"1"}
    assert all(one["equal"] for one in figures["correct"])
    assert figures["environment"]["torch"] == torch.__version__


def test_every_arm_preloads_before_its_clock_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[torch.device] = []
    preload = sg.preload
    monkeypatch.setattr(sg, "preload", lambda device: loaded.append(device) or preload(device))
    assert runs.measure_arm("eager", plan(preloaded=True))["preloaded"]
    assert loaded == [CPU]
    assert not runs.measure_arm("eager", plan())["preloaded"]
    assert loaded == [CPU]


def test_a_failing_arm_is_reported(tmp_path: Path) -> None:
    figures = runs.measure(runs.Run("eager"), plan(model="7b"), runs.CompileCaches(tmp_path))
    assert figures["status"] == "failed"
    assert "FileNotFoundError" in figures["error"]


def test_an_arm_that_is_not_available_is_no_failure(tmp_path: Path) -> None:
    assert runs.run_arm("plain-loop", plan(), str(tmp_path), 0)["status"] == "not available"


def test_an_arm_has_its_compile_caches_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "theirs")
    monkeypatch.setattr(runs, "measure_arm", lambda *_: {"seen": os.environ["TRITON_CACHE_DIR"]})
    assert runs.run_arm("eager", plan(), str(tmp_path), 0)["seen"] == str(tmp_path / "triton")
    assert os.environ["TRITON_CACHE_DIR"] == "theirs"


def test_compiled_arms_run_cold_then_warm_on_the_same_cache(tmp_path: Path) -> None:
    chosen = runs.runs_of(["eager", "compiled-full"])
    assert [run.label for run in chosen] == ["eager", "compiled-full (cold)", "compiled-full (warm)"]
    caches = runs.CompileCaches(tmp_path)
    _, cold, warm = chosen
    first = caches.folder(cold.arm, cold.cache)
    assert caches.folder(warm.arm, warm.cache) == first
    assert caches.folder(cold.arm, cold.cache) != first


def test_a_warm_run_without_its_cold_one_fails_with_the_reason(tmp_path: Path) -> None:
    warm = runs.Run("compiled-full", "warm")
    result = runs.measure(warm, runs.StartupPlan("tiny", (1,)), runs.CompileCaches(tmp_path))
    assert result["status"] == "failed"
    assert "needs the cache of compiled-full (cold)" in result["error"]


def test_a_comparison_that_is_cut_short_has_kept_the_arms_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(run: runs.Run, *_: Any) -> dict[str, Any]:
        if run.arm == "simplegraph":
            raise KeyboardInterrupt
        return {"arm": run.arm, "status": "ok", "seconds": {"ready": 1.0}}

    monkeypatch.setattr(runs, "measure", measured)
    kept: list[list[str]] = []
    chosen = [runs.Run("eager"), runs.Run("simplegraph-lazy"), runs.Run("simplegraph")]
    with pytest.raises(KeyboardInterrupt):
        runs.run_all(
            chosen, runs.StartupPlan("tiny", (1,)), runs.CompileCaches(tmp_path), lambda found: kept.append([*found])
        )
    assert kept == [["eager"], ["eager", "simplegraph-lazy"]]


def _dies(*_: Any) -> None:
    os._exit(3)


def _hangs(*_: Any) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("run_arm", "settings", "error"),
    [(_dies, {}, "the process died with exit code 3"), (_hangs, {"timeout": 0.5}, "took more than 0.5 s")],
)
def test_a_process_that_dies_or_hangs_fails_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_arm: Any, settings: dict[str, Any], error: str
) -> None:
    monkeypatch.setattr(runs, "run_arm", run_arm)
    result = runs.measure(runs.Run("eager"), plan(**settings), runs.CompileCaches(tmp_path))
    assert (result["status"], result["error"]) == ("failed", error)


def test_every_arm_can_be_loaded_without_a_gpu() -> None:
    assert {load_arm(name).name for name in ARMS} == set(ARMS)
