"""Models sleep and wake: their memory is poisoned meanwhile, and no graph is captured again."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as _optimizer

import simplegraph as sg
from simplegraph.device.emulator.device import EmulatorDevice
from simplegraph.device.protocol import Inventory, MemoryKind, MemorySpan, Touch
from simplegraph.device.select import graph_device
from simplegraph.guard.guards import CapturedState
from simplegraph.sleeping import graph_holders, regions, sleeper
from simplegraph.sleeping.cuda import CudaRegion
from simplegraph.sleeping.emulated import EmulatedRegion

SIZES, WIDTH = [1, 2, 4], 6
pytestmark = pytest.mark.usefixtures("inference_mode")


def on(device: torch.device) -> Any:
    return sg.sleepable(device=device)


def built(device: torch.device, *, width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(device).eval()


def captured(device: torch.device, **settings: Any) -> tuple[Any, Tensor, list[Tensor]]:
    """A wrapped model that can sleep, its input, and its answers."""
    with torch.inference_mode(False), on(device):
        model = sg.wrap(built(device), capture_sizes=SIZES, progress=False, **settings)
    x = torch.randn(4, WIDTH, device=device)
    model.capture_graphs(x)
    answers(model, x)
    return model, x, answers(model, x)


def answers(model: Any, x: Tensor) -> list[Tensor]:
    return [model(x[:size]).clone() for size in (1, 2, 3, 4)]


def calls_are_checked_first(model: Any, x: Tensor) -> Tensor:
    """Let the next calls be checked before a launch, by holding the latest static output. Returns that output.

    After a launch that could not be early, 1 call is checked first, then 2, and then 4.
    """
    with torch.inference_mode():
        held = model(x)
        for _ in range(4):
            held = model(x)
    assert isinstance(held, Tensor)
    return held


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


def test_answers_after_waking_are_the_same_bits_and_nothing_is_captured_again(device: torch.device) -> None:
    model, x, wanted = captured(device)
    captures, eager = model.graph_stats.captures, model.graph_stats.eager.total()
    for _ in range(3):
        model.sleep()
        model.wake()
        assert same(answers(model, x), wanted)
    stats = model.graph_stats
    assert (stats.captures, stats.recaptures, stats.eager.total()) == (captures, 0, eager)


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads memory that sleeps")
def test_weights_are_poisoned_while_they_sleep() -> None:
    model, _, _ = captured(torch.device("cpu"))
    before = model[0].weight.clone()
    model.sleep()
    assert model[0].weight.isnan().all()
    model.wake(["weights"])
    assert torch.equal(model[0].weight, before)


def test_memory_that_dies_while_sleep_looks_is_not_written_to(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the garbage collector: on a CPU somebody else has that memory by then."""
    with on(device):
        kept, dying = torch.ones(WIDTH, device=device), [torch.ones(1000, device=device)]
    size, check, written = dying[0].nbytes, sleeper._check_complete, []
    monkeypatch.setattr(sleeper, "_check_complete", lambda *found: (dying.clear(), check(*found)))
    monkeypatch.setattr(EmulatedRegion, "unmap", lambda region, block: written.append(block.size))
    monkeypatch.setattr(EmulatedRegion, "map", lambda region, block: True)
    sg.sleep()
    sg.wake()
    assert kept.tolist() == [1.0] * WIDTH
    # Other regions of the process sleep as well.
    assert size not in written
    assert device.type == "cuda" or kept.nbytes in written


def test_a_view_that_is_made_in_the_block_leaves_memory_from_outside_awake(device: torch.device) -> None:
    outside = torch.ones(WIDTH, device=device)
    with on(device):
        view = torch.empty(0, device=device).set_(outside.untyped_storage(), 0, (WIDTH,), (1,))
        asleep = torch.ones(WIDTH, device=device)
    sg.sleep()
    assert outside.tolist() == view.tolist() == [1.0] * WIDTH
    sg.wake()
    assert asleep.tolist() == [1.0] * WIDTH


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads memory that sleeps")
def test_a_graph_that_reads_sleeping_memory_behind_our_back_shows() -> None:
    model, x, wanted = captured(torch.device("cpu"))
    graph = next(iter(model.graph_manager.table.graphs.values()))
    model.sleep()
    graph.program.replay()
    assert graph.program.outputs[0].isnan().all()
    model.wake()
    assert same(answers(model, x), wanted)


def test_the_report_says_what_went_and_what_is_on_the_host(device: torch.device) -> None:
    model, _, _ = captured(device)
    weights = sum(each.nbytes for each in model.parameters())
    report = model.sleep()
    assert report.given_back >= weights
    assert weights <= report.on_host <= report.given_back
    assert report.kept == ()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model(x),
        lambda model, x: sg.unwrap(model)(x),
        lambda model, x: model.capture_graphs(x),
        lambda model, x: model.static_inputs(),
        lambda model, x: model.half(),
        lambda model, x: model.to(torch.float64),
        lambda model, x: model.load_state_dict({}),
        lambda model, x: model.state_dict(),
        lambda model, x: copy.copy(model),
        lambda model, x: copy.deepcopy(model),
        lambda model, x: copy.deepcopy(nn.ModuleList([sg.unwrap(model)])),
        lambda model, x: pickle.dumps(model),
        lambda model, x: model.sleep(),
    ],
)
def test_what_needs_sleeping_memory_is_refused_with_the_remedy(device: torch.device, use: Any) -> None:
    model, x, wanted = captured(device)
    model.sleep()
    with pytest.raises(sg.AsleepError, match=r"wake\(\)"):
        use(model, x)
    model.wake()
    assert same(answers(model, x), wanted)
    assert not {"forward", "_apply", "load_state_dict", "state_dict", "__getstate__"} & vars(model).keys()


def test_a_module_inside_its_wrapper_waits_for_its_cache_when_weights_are_awake(device: torch.device) -> None:
    """Its layers run, whose own weights are there; the forward reads the cache."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            with sg.sleepable("caches", device):
                self.cache = torch.ones(WIDTH, device=device)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.cache

    with sg.sleepable(device=device):
        model = sg.wrap(Cached().to(device).eval(), capture_sizes=[2], progress=False)
    with torch.inference_mode():
        x = torch.randn(2, WIDTH, device=device)
        model.capture_graphs(x)
        wanted = model(x)
        model.sleep(caches="host")
        model.wake(parts=["weights"])
        assert torch.isfinite(sg.unwrap(model).layer(x)).all()
        with pytest.raises(sg.AsleepError, match=r"wake\(\)"):
            sg.unwrap(model)(x)
        model.wake()
        assert torch.equal(model(x), wanted)


def test_eager_calls_are_refused_too(device: torch.device) -> None:
    model, x, wanted = captured(device)
    model.sleep()
    with sg.eager(), pytest.raises(sg.AsleepError):
        model(x)
    with pytest.raises(sg.AsleepError):
        model(torch.randn(9, WIDTH, device=device))  # larger than every size
    model.wake()
    assert same(answers(model, x), wanted)


def test_a_call_wakes_it_where_that_is_asked_for(device: torch.device) -> None:
    model, x, wanted = captured(device)
    model.sleep(wake_on_call=True)
    assert same(answers(model, x), wanted)
    model.sleep(wake_on_call=True)
    assert torch.equal(sg.unwrap(model)(x), wanted[3])


def test_calls_are_refused_until_all_parts_are_awake(device: torch.device) -> None:
    with torch.inference_mode(False), sg.sleepable("caches", device):
        cache = torch.full((32,), 3.0, device=device)
    model, x, wanted = captured(device)
    sg.sleep()
    for parts in (["weights"], ["caches"]):
        sg.wake(parts=parts)
        with pytest.raises(sg.AsleepError, match="graphs"):
            model(x)
    assert cache.eq(3).all()
    sg.wake(parts=["graphs"])
    assert same(answers(model, x), wanted)


def test_one_part_can_be_woken_by_its_name(device: torch.device) -> None:
    model, x, wanted = captured(device)
    weights = [each.clone() for each in model.parameters()]
    model.sleep()
    model.wake(parts="weights")
    assert same([*model.parameters()], weights)
    with pytest.raises(sg.AsleepError, match=r"asleep \(graphs\)"):
        model(x)
    sg.wake(parts="graphs")
    assert same(answers(model, x), wanted)


def test_discarded_weights_are_nan_until_they_are_loaded(device: torch.device) -> None:
    with torch.inference_mode(False), on(device):
        module = built(device)
        module.register_buffer("scale", torch.full((WIDTH,), 2.0, device=device), persistent=False)
        model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    x = torch.randn(4, WIDTH, device=device)
    model.capture_graphs(x)
    answers(model, x)
    wanted, checkpoint = answers(model, x), {name: each.clone() for name, each in model.state_dict().items()}
    report = model.sleep(weights="discard")
    assert report.on_host < report.given_back
    model.wake()
    assert all(each.isnan().all() for each in model.parameters())
    assert model.scale.eq(2).all()  # no checkpoint has it
    model.load_state_dict(checkpoint)
    assert same(answers(model, x), wanted)
    assert model.graph_stats.recaptures == 0


def test_discarded_caches_are_zeros(device: torch.device) -> None:
    with torch.inference_mode(False), sg.sleepable("caches", device):
        cache = torch.full((32,), 3.0, device=device)
    sg.sleep(caches="discard")
    sg.wake()
    assert not cache.any()


def test_weights_that_are_kept_can_be_read(device: torch.device) -> None:
    model, x, wanted = captured(device)
    before = model[0].weight.clone()
    model.sleep(weights="keep")
    assert torch.equal(model[0].weight, before)
    with pytest.raises(sg.AsleepError, match=r"asleep \(graphs\)"):
        model(x)
    model.wake()
    assert same(answers(model, x), wanted)


def test_a_parameter_that_is_replaced_meanwhile_is_seen_by_the_guards(device: torch.device) -> None:
    model, x, wanted = captured(device)
    model.sleep()
    with torch.inference_mode(False):
        model[2].bias = nn.Parameter(torch.full((WIDTH,), 5.0, device=device))
    model.wake()
    found = [answers(model, x) for _ in range(3)][-1]
    assert not same(found, wanted)
    torch.testing.assert_close(found[3], sg.unwrap(model)(x))
    assert model.graph_stats.recaptures == 1


def test_what_cannot_sleep_is_named_and_kept_or_refused(device: torch.device) -> None:
    outside = torch.full((WIDTH,), 2.0, device=device)
    with torch.inference_mode(False), on(device):
        module = built(device)
    module.table = outside
    model = sg.wrap(Scaled(module), capture_sizes=SIZES, progress=False)
    x = torch.randn(4, WIDTH, device=device)
    model.capture_graphs(x)
    answers(model, x)
    wanted = answers(model, x)
    with pytest.raises(sg.ConfigError, match=r"inner\.table \(1 in all"):
        model.sleep(foreign="refuse")
    assert same(answers(model, x), wanted)
    (line,) = model.sleep().kept
    assert "inner.table" in line
    assert outside.eq(2).all()
    model.wake()
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize("kind", [MemoryKind.FOREIGN, MemoryKind.OUTSIDE, MemoryKind.FREED])
def test_what_the_driver_says_of_unknown_memory_is_named_with_its_kernel(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: MemoryKind
) -> None:
    if device.type == "cuda":
        pytest.skip("here a test speaks for the driver")
    model, x, wanted = captured(device)
    known: list[MemorySpan] = []

    def inventory(device: object, pool: object, segments: object, accounted: Any, **options: object) -> Inventory:
        known.extend(accounted)
        return Inventory(touches=[Touch("scale", 0x7F0000000480, 0, kind, "", certain=True)])

    monkeypatch.setattr(graph_holders, "take_inventory", inventory)
    with pytest.raises(sg.ConfigError, match=rf"{kind.value}, read by the kernel scale"):
        model.sleep(foreign="refuse")
    assert same(answers(model, x), wanted)
    report = model.sleep()
    assert report.kept == (f"Sequential: {kind.value}, read by the kernel scale",)
    assert {each.name for each in known} >= {"weights", "graphs"}
    model.wake()
    assert same(answers(model, x), wanted)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.table


def test_nothing_to_put_to_sleep_is_an_error(device: torch.device) -> None:
    model = sg.wrap(built(device), capture_sizes=SIZES, progress=False)
    with pytest.raises(sg.ConfigError, match=r"call sg\.sleepable\(\) first"):
        model.sleep()


def test_memory_that_is_still_being_built_does_not_sleep(device: torch.device) -> None:
    """On a GPU the next allocation of the block would be in memory that went back to the driver."""
    model, x, wanted = captured(device)
    with torch.inference_mode(False), on(device):
        with pytest.raises(sg.ConfigError, match=r"call sleep\(\) after the block"):
            sg.sleep()  # nothing was built yet
        other = sg.wrap(built(device), capture_sizes=SIZES, progress=False)
        for sleep in (sg.sleep, other.sleep):
            with pytest.raises(sg.ConfigError, match=r"an sg\.sleepable\(\) block is open"):
                sleep()
        assert other[0].weight.isfinite().all()
        model.sleep()  # its block is closed
        more = torch.ones(4, device=device)
    assert other(x).isfinite().all()
    sg.sleep()
    sg.wake()
    assert more.eq(1).all()
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize("use", [sg.sleep, sg.wake])
def test_what_holds_no_graphs_is_refused_by_what_is_accepted(device: torch.device, use: Any) -> None:
    model, x, wanted = captured(device)
    for owner in ([model], "Sequential", nn.Sequential, sg.wrap(lambda x: x + 1)):
        with pytest.raises(sg.InputError, match=r"owner is a \w+; expected a wrapped module, a Cuda.* sleep\(\)"):
            use(owner)
    assert same(answers(model, x), wanted)


def test_models_that_share_memory_sleep_together_or_not_at_all(device: torch.device) -> None:
    with torch.inference_mode(False), on(device):
        first, second = (sg.wrap(built(device), capture_sizes=SIZES, progress=False) for _ in range(2))
    x = torch.randn(4, WIDTH, device=device)
    for model in (first, second):
        model.capture_graphs(x)
        answers(model, x)
    wanted = [answers(model, x) for model in (first, second)]
    with pytest.raises(sg.ConfigError, match="shares sleepable memory"):
        first.sleep()
    assert same(answers(second, x), wanted[1])
    sg.sleep()
    for model in (first, second):
        with pytest.raises(sg.AsleepError):
            model(x)
    sg.wake()
    assert [same(answers(model, x), each) for model, each in zip((first, second), wanted, strict=True)] == [True, True]


def test_one_of_two_models_sleeps_while_the_other_replays(device: torch.device) -> None:
    first, x, wanted = captured(device)
    second, y, others = captured(device)
    first.sleep()
    replays = second.graph_stats.replays
    assert same(answers(second, y), others)
    assert second.graph_stats.replays == replays + 4
    sg.sleep()
    first.wake()
    assert same(answers(first, x), wanted)
    with pytest.raises(sg.AsleepError):
        second(y)


def test_functions_sleep(device: torch.device) -> None:
    with torch.inference_mode(False), on(device):
        weight = torch.randn(WIDTH, WIDTH, device=device)
        scale = sg.wrap(lambda x: x @ weight, capture_sizes=SIZES, progress=False)
    x = torch.randn(4, WIDTH, device=device)
    scale.capture_graphs(x)
    answers(scale, x)
    wanted = answers(scale, x)
    scale.sleep()
    with pytest.raises(sg.AsleepError):
        scale(x)
    scale.wake()
    assert same(answers(scale, x), wanted)


def test_static_outputs_are_what_they_were(device: torch.device) -> None:
    model, x, _ = captured(device, outputs="static")
    result = model(x)
    before = result.clone()
    model.sleep()
    model.wake()
    assert torch.equal(result, before)


def test_inputs_that_were_written_in_place_are_what_they_were(device: torch.device) -> None:
    model, x, wanted = captured(device)
    (static,) = model.static_inputs(4).values()
    static.copy_(x)
    model.sleep()
    model.wake()
    assert torch.equal(static, x)
    assert torch.equal(model(static), wanted[3])


def test_waking_without_memory_names_how_much_and_works_later(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("tests/gpu has this")
    model, x, wanted = captured(device)
    model.sleep()
    with monkeypatch.context() as patched:
        patched.setattr(EmulatorDevice, "free_memory", lambda self: 8)
        with pytest.raises(sg.AsleepError, match=r"waking needs 0\.00 GiB, and 0\.00 GiB is free on cpu"):
            model.wake()
        with pytest.raises(sg.AsleepError, match="is asleep"):
            model(x)
    assert model[0].weight.isnan().all()
    model.wake()
    assert same(answers(model, x), wanted)


def test_a_sleep_that_fails_leaves_everything_awake(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, wanted = captured(device)

    def fails(self: object, size: int) -> Tensor:
        raise RuntimeError("no pinned memory")

    for kind in (EmulatedRegion, CudaRegion):
        monkeypatch.setattr(kind, "host_buffer", fails)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        model.sleep()
    assert same(answers(model, x), wanted)
    monkeypatch.undo()
    model.sleep()
    model.wake()
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_no_copy_stays_on_the_host_after_waking_or_a_sleep_that_failed_or_was_interrupted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    """Pinned memory of the size of all weights would be gone for as long as the model lives."""
    model, x, wanted = captured(device)
    make, made = regions.MemoryRegion.host_buffer, []

    def fails_at_last(self: Any, size: int) -> Tensor:
        if error is not None and self.part == "graphs":
            raise error("stopped")
        buffer = make(self, size)
        made.append(weakref.ref(buffer))
        return buffer

    with monkeypatch.context() as patched:
        patched.setattr(regions.MemoryRegion, "host_buffer", fails_at_last)
        with contextlib.nullcontext() if error is None else pytest.raises(error, match="stopped"):
            model.sleep()
            model.wake()
    gc.collect()
    assert made, "the weights were copied"
    assert [buffer() for buffer in made] == [None] * len(made)
    assert same(answers(model, x), wanted)
    model.sleep()
    model.wake()
    assert same(answers(model, x), wanted)


def test_a_replay_on_another_thread_is_done_before_and_refused_after(device: torch.device) -> None:
    model, x, wanted = captured(device)
    refused, wrong, done, stop = [0], [0], [0], threading.Event()

    def replay() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                try:
                    wrong[0] += not torch.equal(model(x), wanted[3])
                    done[0] += 1
                except sg.AsleepError:
                    refused[0] += 1

    thread = threading.Thread(target=replay)
    thread.start()
    try:
        for _ in range(20):
            model.sleep()
            model.wake()
        before = done[0]
        while done[0] < before + 3 and thread.is_alive():
            pass
    finally:
        stop.set()
        thread.join()
    assert wrong == [0]
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize("outputs", ["clone", "static"])
@pytest.mark.parametrize("wake_on_call", [False, True])
def test_a_replay_that_waited_for_the_pool_is_refused_or_wakes_it(
    device: torch.device, wake_on_call: bool, outputs: str
) -> None:
    """It passed every check before the model went to sleep."""
    model, x, wanted = captured(device, outputs=outputs)
    lock, found = model.graph_manager.pool.lock, []

    def replay() -> None:
        with torch.inference_mode():
            try:
                found.append(model(x))
            except sg.AsleepError as error:
                found.append(error)

    with lock:
        thread = threading.Thread(target=replay)
        thread.start()
        thread.join(0.2)
        model.sleep(wake_on_call=wake_on_call)
    thread.join()
    assert torch.equal(found[0], wanted[3]) if wake_on_call else isinstance(found[0], sg.AsleepError)
    model.wake()
    assert same(answers(model, x), wanted)
    assert model.graph_stats.recaptures == 0


def test_memory_that_refuses_to_be_read_is_not_taken_for_moved(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waited for the lock asks if memory moved: some releases of torch refuse to show sleeping memory."""
    model, x, wanted = captured(device, outputs="static")
    held = calls_are_checked_first(model, x)
    found: list[BaseException] = []

    def replay() -> None:
        with torch.inference_mode():
            try:
                model(x)
            except sg.AsleepError as error:
                found.append(error)

    with monkeypatch.context() as patched:
        with model.graph_manager.pool.lock:
            thread = threading.Thread(target=replay)
            thread.start()
            thread.join(0.2)
            model.sleep()
            patched.setattr(CapturedState, "moved", lambda self: True)
        thread.join()
    assert len(found) == 1
    assert held.shape == x.shape
    model.wake()
    assert same(answers(model, x), wanted)
    assert model.graph_stats.recaptures == 0


def test_a_sleep_inside_a_capture_or_a_forward_is_refused(device: torch.device) -> None:
    model, x, wanted = captured(device)

    class Sleeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.raises(sg.CaptureError):
                model.sleep()
            return x + 1

    other = sg.wrap(Sleeps().eval(), capture_sizes=[4], progress=False)
    other.capture_graphs(x)
    assert torch.equal(other(x), x + 1)
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"weights": "disk"}, "weights"), ({"caches": "drop"}, "caches"), ({"foreign": "ignore"}, "foreign")],
)
def test_unknown_options_are_errors(device: torch.device, options: dict[str, Any], message: str) -> None:
    model, x, wanted = captured(device)
    with pytest.raises(sg.ConfigError, match=f"{message} is .*expected one of"):
        model.sleep(**options)
    with pytest.raises(sg.ConfigError, match=r"part is 'weight'.*did you mean weights"):
        model.wake(["weight"])
    with pytest.raises(sg.ConfigError, match=r"part is 7; expected one of weights, caches, graphs"):
        model.wake(parts=7)
    with pytest.raises(sg.ConfigError, match=r"'graphs'; expected one of weights, caches\."), sg.sleepable("graphs"):
        pass
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize("owned", [True, False])
def test_sleep_and_wake_inside_a_capture_are_refused_and_change_nothing(device: torch.device, owned: bool) -> None:
    """On a GPU a capture would record the copies, and the memory would be mapped a second time by the next wake."""
    graphs, x = graph_device(device), torch.ones(3, device=device)
    with torch.inference_mode(False), on(device):
        kept = torch.arange(5.0, device=device)
    model, rows, wanted = captured(device) if owned else (None, None, None)
    uses = [sg.wake, sg.sleep] if model is None else [model.wake, sg.wake, model.sleep]
    sg.sleep()
    for use in uses:
        if use is sg.sleep:
            sg.wake()  # nothing but tensors, which no manager stands for
        with graphs.on_capture_stream():
            graphs.begin(graphs.new_pool())
            with pytest.raises(sg.CaptureError, match="is being captured"):
                use()
            y = x * 2
            graph = graphs.end()
        graph.replay()
        assert torch.equal(y, x * 2)
    sg.wake()
    assert torch.equal(kept, torch.arange(5.0, device=device))
    assert model is None or same(answers(model, rows), wanted)


def test_a_copy_that_wakes_is_whole(device: torch.device) -> None:
    model, x, wanted = captured(device)
    for module in (model, sg.unwrap(model)):
        model.sleep(wake_on_call=True)
        other = copy.deepcopy(module)
        assert not {"forward", "state_dict", "__getstate__"} & vars(other).keys()
        assert type(other) is type(module)
        with torch.inference_mode(False), torch.no_grad():
            model[2].bias += 1
        assert torch.equal(other(x[:1]), wanted[0])
        with torch.inference_mode(False), torch.no_grad():
            model[2].bias -= 1
        wanted = answers(model, x)


def test_everything_that_sleeps_already_is_said_to(device: torch.device) -> None:
    model, x, wanted = captured(device)
    sg.sleep()
    with pytest.raises(sg.AsleepError, match=r"is asleep already; call wake\(\) first"):
        sg.sleep()
    sg.wake(parts=["weights"])
    with pytest.raises(sg.AsleepError, match="asleep already"):
        sg.sleep()
    _other, _, _ = captured(device)
    with pytest.raises(sg.ConfigError, match=r"which is partly asleep; call wake\(\) first"):
        sg.sleep()
    sg.wake()
    assert same(answers(model, x), wanted)


def test_two_threads_put_a_model_to_sleep_once(device: torch.device) -> None:
    """The second waited for the pool; it must not put to sleep the weights that the first one keeps awake."""
    model, x, wanted = captured(device)
    refused: list[BaseException] = []

    def sleep(**options: str) -> None:
        try:
            model.sleep(**options)
        except sg.SimpleGraphError as error:
            refused.append(error)

    threads = [threading.Thread(target=sleep, kwargs={"weights": weights}) for weights in ("keep", "host")]
    with model.graph_manager.pool.lock:
        for thread in threads:
            thread.start()
            thread.join(0.2)
    for thread in threads:
        thread.join()
    assert [type(error) for error in refused] == [sg.AsleepError]
    assert "is asleep already" in str(refused[0])
    model.wake()
    assert same(answers(model, x), wanted)


def test_waking_what_is_awake_does_no_harm(device: torch.device) -> None:
    model, x, wanted = captured(device)
    model.wake()
    sg.wake()
    assert same(answers(model, x), wanted)


def test_graphs_may_be_dropped_while_they_sleep(device: torch.device) -> None:
    model, x, wanted = captured(device)
    model.sleep()
    model.reset_graphs()
    model.wake()
    assert same([answers(model, x) for _ in range(3)][-1], wanted)


def test_a_model_that_is_dropped_asleep_leaves_nothing(device: torch.device) -> None:
    model, _, _ = captured(device)
    model.sleep()
    del model
    gc.collect()
    sg.wake()
    other, x, wanted = captured(device)
    other.sleep()
    other.wake()
    assert same(answers(other, x), wanted)


def test_a_process_may_end_asleep(device: torch.device) -> None:
    script = (
        "import torch, simplegraph as sg\n"
        f"with sg.sleepable(device='{device.type}'):\n"
        f"    model = sg.wrap(torch.nn.Linear(8, 8).to('{device.type}').eval(), progress=False)\n"
        "with torch.inference_mode():\n"
        f"    model(torch.ones(2, 8, device='{device.type}'))\n"
        "sg.sleep()\n"
        "print('asleep')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stdout) == (0, "asleep\n"), run.stderr


def test_threads_may_build_and_drop_sleepable_models_at_once(device: torch.device) -> None:
    """Unused memory is given back by whoever allocates next: once, though several do."""
    failed: list[BaseException] = []

    def build() -> None:
        try:
            for _ in range(10):
                with on(device):
                    torch.zeros(64, device=device)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def stepped(model: Any, kind: Any, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer of a model's weights, with their gradients."""
    optimizer = kind(model.parameters(), **settings)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("everything", [True, False])
def test_no_optimizer_steps_weights_that_sleep(device: torch.device, kind: Any, everything: bool) -> None:
    """The step ran, and waking put the weights back that were there before it."""
    model, x, wanted = captured(device)
    with torch.inference_mode(False):
        optimizer, bystander = stepped(model, kind, lr=0.1), stepped(built(device), torch.optim.SGD, lr=0.1)
        before = [each.clone() for each in model.parameters()]
        (sg if everything else model).sleep()
        with pytest.raises(sg.AsleepError, match=r"asleep \(weights, graphs\): call wake\(\) first"):
            optimizer.step()
        bystander.step()
        model.wake(["weights"])
        optimizer.step()
        assert not same([*model.parameters()], before)
    model.wake()
    assert not same(answers(model, x), wanted)
    assert torch.equal(model(x), sg.unwrap(model)(x))


def test_the_state_of_an_optimizer_that_sleeps_is_not_stepped(device: torch.device) -> None:
    with torch.inference_mode(False):
        model = built(device)
        optimizer = stepped(model, torch.optim.AdamW, lr=0.1)
        with on(device):
            optimizer.step()  # makes the state
        sg.sleep()
        with pytest.raises(sg.AsleepError, match=r"wake\(\)"):
            optimizer.step()
        sg.wake()
        optimizer.step()
        assert all(each.isfinite().all() for each in model.parameters())


def test_a_step_wakes_its_weights_where_that_is_asked_for(device: torch.device) -> None:
    model, x, _ = captured(device)
    with torch.inference_mode(False):
        twin = built(device)
        for each in (optimizer := stepped(model, torch.optim.SGD, lr=0.1)), stepped(twin, torch.optim.SGD, lr=0.1):
            if each is optimizer:
                model.sleep(wake_on_call=True)
            each.step()
        assert same([*model.parameters()], [*twin.parameters()])
    torch.testing.assert_close(model(x), twin(x))
    model.sleep()
    model.wake()
    assert not _optimizer._global_optimizer_pre_hooks


def test_a_training_step_is_served_while_another_model_sleeps(device: torch.device) -> None:
    model, x, wanted = captured(device)
    with torch.inference_mode(False):
        other = built(device).train()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)

        def train(batch: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = other(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = sg.train_step(train, optimizers=optimizer)
        for number in range(8):
            if number == 5:
                replays = step.graph_stats.replays
                model.sleep()
            step(torch.randn(4, WIDTH, device=device))
        assert step.graph_stats.replays == replays + 3
    model.wake()
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize(
    "write",
    [
        lambda model: model[0].weight.data.mul_(2),
        lambda model: model[0].bias.add_(1),
        lambda model: model[2].weight.data.copy_(torch.ones_like(model[0].weight).T * 2),
    ],
)
def test_a_write_to_sleeping_memory_is_refused_or_said_to_be_lost(device: torch.device, write: Any) -> None:
    """On a GPU by torch itself, for the address is illegal; where it is emulated, as soon as the memory is back."""
    model, x, wanted = captured(device)
    model.sleep()
    if device.type == "cuda":
        if regions._allow is None:
            pytest.skip("this torch cannot refuse the use of a storage: a write is an illegal memory access")
        with pytest.raises(RuntimeError, match=r"asleep: call wake\(\) before its memory is read or written"):
            write(model)
        model.wake()
    else:
        write(model)
        with pytest.raises(sg.AsleepError, match=r"\(weights\) was written while it slept, and that is lost"):
            model.wake()
    assert same(answers(model, x), wanted)  # it is awake, whatever was said
    write(model)
    assert torch.equal(model(x), sg.unwrap(model)(x))


def test_calls_while_it_sleeps_are_no_calls_of_another_kind(device: torch.device) -> None:
    """What stands in front of the module's methods meanwhile is no value of the user's."""
    model, x, wanted = captured(device)
    eager = model.graph_stats.eager.copy()
    for _ in range(20):
        model.sleep()
        with pytest.raises(sg.AsleepError):
            model(x)
        model.wake()
    assert len(model._graph_runner._calls.bindings) == 1
    assert same(answers(model, x), wanted)
    assert model.graph_stats.eager == eager


def test_a_write_to_a_static_input_that_sleeps_is_not_lost_unsaid(device: torch.device) -> None:
    model, x, wanted = captured(device)
    static = model.static_inputs()["input"]
    model.sleep()
    if device.type == "cuda":
        if regions._allow is None:
            pytest.skip("this torch cannot refuse the use of a storage: a write is an illegal memory access")
        with pytest.raises(RuntimeError, match=r"asleep: call wake\(\)"):
            static.fill_(1)
        model.wake()
    else:
        static.fill_(1)
        with pytest.raises(sg.AsleepError, match=r"\(graphs\) was written while it slept"):
            sg.wake()
    assert same(answers(model, x), wanted)


@pytest.mark.parametrize("drops", [False, True])
def test_what_sleeps_is_refused_by_torch_until_it_wakes(monkeypatch: pytest.MonkeyPatch, drops: bool) -> None:
    """Only a torch that is built for a GPU can refuse: here stand-ins note what it is told."""
    refused: dict[int, str] = {}
    monkeypatch.setattr(regions, "_refuse", refused.__setitem__)
    monkeypatch.setattr(regions, "_allow", refused.pop)
    monkeypatch.setattr(EmulatedRegion, "refuse_use", regions.MemoryRegion.refuse_use)
    model, x, wanted = captured(torch.device("cpu"))
    kept, weight = model[2].weight, model[0].weight.untyped_storage()._cdata
    used = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.static_inputs().values())}
    with torch.inference_mode(False):
        optimizer = stepped(model, torch.optim.SGD, lr=0.1)
    model.sleep()
    assert refused.keys() == used
    assert set(refused.values()) == {"Sequential is asleep: call wake() before its memory is read or written."}
    with pytest.raises(sg.AsleepError):
        optimizer.step()
    if drops:
        del optimizer, model[0]
        gc.collect()
    model.wake("weights")
    assert weight not in refused
    assert kept.untyped_storage()._cdata not in refused
    model.wake()
    assert not refused
    if not drops:
        assert same(answers(model, x), wanted)
