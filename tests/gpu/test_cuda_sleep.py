"""Sleep on a GPU: memory goes back to the driver and comes again, and graphs replay without being captured again."""

from __future__ import annotations

import faulthandler
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.tools.neighbor import neighbor
from simplegraph.base.extras import memory_sources

pytestmark = pytest.mark.alone  # it measures free memory, and another process fills it

MIB, WIDTH = 1 << 20, 2048
SIZES = [1, 2, 4, 8]


@pytest.fixture(autouse=True)
def _sources() -> Iterator[None]:
    """Graphs of other tests have ordinary memory, and a hang ends the process."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    sg.wake()
    memory_sources.clear()
    gc.collect()
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


def stack(layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(layers)]
    return nn.Sequential(*blocks).to("cuda", torch.bfloat16).eval()


def captured(**settings: Any) -> tuple[Any, Tensor, list[Tensor]]:
    """A wrapped model that can sleep, its input, and its answers to each size."""
    with sg.sleepable():
        model = sg.wrap(stack(), capture_sizes=SIZES, progress=False, **settings)
    x = torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16)
    model.capture_graphs(x)
    answers(model, x)
    return model, x, answers(model, x)


def answers(model: Any, x: Tensor) -> list[Tensor]:
    return [model(x[:size]).clone() for size in (*SIZES, 3)]


def large() -> Tensor:
    """4 GiB that sleep."""
    with sg.sleepable("caches"):
        return torch.full((4096 * MIB,), 7, dtype=torch.uint8, device="cuda")


def free() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


@pytest.mark.usefixtures("device_works")
def test_ten_cycles_give_the_weights_back_and_answer_to_the_bit_without_a_capture() -> None:
    model, x, wanted = captured()
    weights = sum(each.nbytes for each in model.parameters())
    captures, before, asleep, awake = model.graph_stats.captures, free(), [], []
    for _ in range(10):
        report = model.sleep()
        asleep.append(free())
        model.wake()
        assert same(answers(model, x), wanted)
        awake.append(free())
    assert report.given_back > weights
    assert report.kept == ()
    assert asleep[0] - before >= report.given_back - 4 * MIB
    assert len(set(asleep[1:])) == len(set(awake[1:])) == 1
    assert (model.graph_stats.captures, model.graph_stats.recaptures) == (captures, 0)


@pytest.mark.usefixtures("device_works")
def test_another_process_fills_the_memory_with_nan_meanwhile() -> None:
    cache = large()
    model, x, wanted = captured()
    before = free()
    sg.sleep()
    with neighbor() as taken:
        assert taken > before  # though it has a context itself
    sg.wake()
    assert same(answers(model, x), wanted)
    assert cache.eq(7).all()


@pytest.mark.usefixtures("device_works")
def test_waking_without_memory_says_how_much_is_needed_and_works_later() -> None:
    cache = large()
    model, x, wanted = captured()
    report = sg.sleep()
    with neighbor():
        left = free()
        with pytest.raises(sg.AsleepError, match=rf"waking needs {report.given_back / 2**30:.2f} GiB"):
            sg.wake()
        assert free() == left
        with pytest.raises(sg.AsleepError, match="is asleep"):
            model(x)
    sg.wake()
    assert same(answers(model, x), wanted)
    assert cache.eq(7).all()


@pytest.mark.usefixtures("device_works")
def test_weights_come_first_then_caches() -> None:
    with sg.sleepable("caches"):
        cache = torch.zeros(64 * MIB, device="cuda")
    model, x, wanted = captured()
    cache.fill_(3)
    before = free()
    sg.sleep(caches="discard", weights="discard")
    asleep = free()
    assert asleep - before >= cache.nbytes + sum(each.nbytes for each in model.parameters())
    sg.wake(parts=["weights"])
    model.load_state_dict(stack().state_dict())
    with pytest.raises(sg.AsleepError, match="caches, graphs"):
        model(x)
    assert free() > before
    sg.wake()
    assert same(answers(model, x), wanted)
    assert not cache.any()


@pytest.mark.usefixtures("device_works")
def test_a_replay_on_another_thread_is_done_before_and_refused_after() -> None:
    model, x, wanted = captured()
    refused, wrong, done, stop = [0], [0], [0], threading.Event()

    def replay() -> None:
        with torch.inference_mode():
            while not stop.is_set():
                try:
                    wrong[0] += not torch.equal(model(x[:4]), wanted[2])
                    done[0] += 1
                except sg.AsleepError:
                    refused[0] += 1

    thread = threading.Thread(target=replay)
    thread.start()
    for _ in range(20):
        model.sleep()
        model.wake()
    before = done[0]
    while done[0] < before + 10 and thread.is_alive():
        pass
    stop.set()
    thread.join()
    assert wrong == [0]
    assert refused[0]
    assert same(answers(model, x), wanted)


@pytest.mark.usefixtures("device_works")
def test_a_call_wakes_it_where_that_is_asked_for() -> None:
    model, x, wanted = captured()
    sg.sleep(wake_on_call=True)
    assert same(answers(model, x), wanted)


@pytest.mark.usefixtures("device_works")
def test_graphs_from_before_are_named_and_stay_awake() -> None:
    model = sg.wrap(stack(2), capture_sizes=SIZES, progress=False)
    x = torch.randn(8, WIDTH, device="cuda", dtype=torch.bfloat16)
    model.capture_graphs(x)
    answers(model, x)
    wanted = answers(model, x)
    with sg.sleepable():
        model.extra = torch.zeros(8, device="cuda")
    with pytest.raises(sg.ConfigError, match="before the first"):
        model.sleep(foreign="refuse")
    report = model.sleep()
    assert any("before the first" in line for line in report.kept)
    assert any("0.weight" in line for line in report.kept)
    model.wake()
    assert same(answers(model, x), wanted)


@pytest.mark.usefixtures("device_works")
def test_dropped_graphs_and_models_give_their_memory_back() -> None:
    model, x, _ = captured()
    del x, _
    before = free()
    size = model.sleep().given_back
    model.wake()
    model.reset_graphs()
    del model
    gc.collect()
    with sg.sleepable():  # looks for what is unused
        pass
    assert free() - before >= size - 4 * MIB


@pytest.mark.usefixtures("device_works")
def test_a_tensor_that_is_dropped_while_it_sleeps_is_gone_after() -> None:
    model, x, wanted = captured()
    with sg.sleepable("caches"):
        cache = torch.ones(64 * MIB, device="cuda")
    sg.sleep()
    del cache
    free()
    sg.wake()
    assert same(answers(model, x), wanted)
    before = free()
    with sg.sleepable():
        pass
    assert free() - before >= 256 * MIB


def test_threads_that_free_tensors_and_captures_that_allocate_do_not_wait_for_each_other() -> None:
    """The allocator calls into Python; a thread that frees a tensor has Python's lock and wants the allocator's."""
    with sg.sleepable():
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            held = [torch.empty(1000, device="cuda") for _ in range(20)]
            del held

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            step = sg.train_step(lambda x: train(model, optimizer, x), optimizers=optimizer)
            for _ in range(4):
                step(torch.randn(64, 512, device="cuda"))
            assert step.graph_stats.captures
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def train(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.usefixtures("device_left_alone")
def test_a_training_step_sleeps_between_steps_with_its_optimizer() -> None:
    losses: dict[bool, list[float]] = {}
    for sleeps in (False, True):
        torch.manual_seed(0)
        with sg.sleepable():
            model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
            step = sg.train_step(lambda x: train(model, optimizer, x), optimizers=optimizer)  # noqa: B023
            step(torch.ones(64, 512, device="cuda"))  # the first one makes the optimizer's state
        found = []
        for number in range(12):
            torch.manual_seed(number)
            found.append(step(torch.randn(64, 512, device="cuda")).item())
            if sleeps and number in (5, 8):
                report = step.sleep()
                state = sum(each.nbytes for entry in optimizer.state.values() for each in entry.values())
                assert report.given_back > state + sum(each.nbytes for each in model.parameters())
                with pytest.raises(sg.AsleepError):
                    step(torch.randn(64, 512, device="cuda"))
                with neighbor():
                    pass
                step.wake()
        assert step.graph_stats.replays > 4
        assert not step.graph_stats.recaptures
        losses[sleeps] = found
    assert losses[True] == losses[False]


@pytest.mark.usefixtures("device_works")
def test_generate_sleeps_between_two_texts() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    import tiny_models as tiny

    from simplegraph.integrations.transformers import graph_generation

    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**(tiny.LLAMA | shape))
    with sg.sleepable():
        model = tiny.build(lambda: transformers.LlamaForCausalLM(config), torch.device("cuda"))
    graph_generation(model, max_batch_size=2, max_length=64)
    batch = tiny.prompts([5, 9], torch.device("cuda"), 0)
    greedy = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}
    model.generate(**batch, **greedy)
    wanted = model.generate(**batch, **greedy)
    for _ in range(2):
        assert sg.sleep().given_back > sum(each.nbytes for each in model.parameters())
        with neighbor():
            pass
        sg.wake()
        assert torch.equal(model.generate(**batch, **greedy), wanted)


@pytest.mark.usefixtures("device_works")
def test_an_engine_that_speculates_sleeps_between_two_rounds() -> None:
    pytest.importorskip("transformers")
    from bench.engine import SamplingParams
    from bench.engine.spec import SpecEngine
    from bench.engine.spec_config import SpecConfig
    from bench.models.eagle import tiny_pair

    settings = {"max_num_seqs": 8, "max_num_tokens": 64, "max_model_len": 160, "num_pages": 200}

    def outputs(sleep_at: tuple[int, ...]) -> tuple[list[list[int]], int]:
        with sg.sleepable():
            pair = tiny_pair("eagle", device="cuda")
        with sg.sleepable("caches"):
            engine = SpecEngine(*pair, SpecConfig(**settings, num_draft_tokens=3, capture_sizes=(1, 2, 4, 8)))
        engine.capture()
        requests = [engine.add([7 + index, 3, 11, 5], SamplingParams(max_tokens=40)) for index in range(6)]
        for number in range(200):
            if engine.idle:
                break
            with torch.inference_mode():
                engine.step()
            if number in sleep_at:
                sg.sleep()
                with neighbor():
                    pass
                sg.wake()
        return [request.output for request in requests], sum(each.stats.captures for each in engine.managers)

    assert outputs((3, 6)) == outputs(())


def test_a_process_may_end_asleep() -> None:
    script = (
        "import torch, simplegraph as sg\n"
        "with sg.sleepable(): model = sg.wrap(torch.nn.Linear(512, 512).cuda().eval(), progress=False)\n"
        "with torch.inference_mode():\n"
        "    model.capture_graphs(torch.ones(8, 512, device='cuda'))\n"
        "    model.sleep()\n"
        "print('asleep')\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert (run.returncode, run.stdout) == (0, "asleep\n"), run.stderr


@pytest.mark.usefixtures("device_works")
def test_a_sleep_inside_a_capture_is_refused() -> None:
    model, x, wanted = captured()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        scratch = x + 1
        try:
            with pytest.raises(sg.CaptureError):
                model.sleep()
        finally:
            graph.capture_end()
    assert same(answers(model, x), wanted)
    del scratch
