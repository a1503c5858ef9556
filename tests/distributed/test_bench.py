"""The tensor parallel Llama is the Llama, on any number of ranks, and the benchmarks run on several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launch import run_ranks, values

transformers = pytest.importorskip("transformers")

from bench.arms import ALONE, ARMS, OF_RANKS  # noqa: E402
from bench.engine import Engine, EngineConfig, SamplingParams  # noqa: E402
from bench.models.checkpoint import load_checkpoint  # noqa: E402
from bench.models.dtensor import with_dtensors  # noqa: E402
from bench.models.llama import CacheShape, build_llama  # noqa: E402
from bench.models.shard import Shard  # noqa: E402
from bench.models.workload import INPUT_NAMES, Workload  # noqa: E402
from bench.startup import runs  # noqa: E402
from bench.two_batch import steps  # noqa: E402
from simplegraph import RankGroup, wrap  # noqa: E402

ROOT = Path(__file__).parent.parent.parent
CACHE, REQUESTS = CacheShape(7, 16), 3
SECONDS = 240


def config(**changes: Any) -> Any:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "initializer_range": 0.2,  # so that a wrong layer shows in the logits
    }
    return transformers.LlamaConfig(**settings | changes)


def batch(position: int) -> tuple[Tensor, ...]:
    pages = 1 + torch.arange(2 * REQUESTS).view(REQUESTS, 2)
    positions = torch.full((REQUESTS,), position)
    slots = pages[:, 0] * 16 + position
    return torch.arange(REQUESTS) * 7 + position, positions, slots, (positions + 1).int(), pages.int()


def decode(rank: int, size: int, folder: str | None) -> Tensor:
    """Logits of a few steps; on several ranks from full graphs."""
    shard = Shard(rank, size)
    biased = config(attention_bias=True, mlp_bias=True)
    model = build_llama(biased, CACHE, REQUESTS, seed=3, random_weights=folder is None, shard=shard)
    if folder is not None:
        load_checkpoint(model, folder, shard)
    run = model
    if size > 1:
        dims = dict.fromkeys(INPUT_NAMES, 0)
        run = wrap(model, capture_sizes=[REQUESTS], batch_dims=dims, ranks=RankGroup(timeout=30), progress=False)
    with torch.inference_mode():
        found = torch.stack([run(*batch(position)).clone() for position in range(6)])
    assert size == 1 or run.graph_stats.replays >= 4
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_seeded_weights_are_the_same_model_on_any_number_of_ranks(size: int) -> None:
    expected = decode(0, 1, None)
    for logits in values(run_ranks(decode, size, None)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_every_rank_takes_its_part_of_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(config(attention_bias=True, mlp_bias=True)).float()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases too
    reference.save_pretrained(tmp_path)
    expected = decode(0, 1, str(tmp_path))
    for logits in values(run_ranks(decode, 2, str(tmp_path))):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_do_not_divide_the_heads_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"--tp {size} does not divide num_attention_heads=4"):
        build_llama(config(), CACHE, REQUESTS, shard=Shard(0, size))


def on_dtensors(rank: int, size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """A few steps of the model on plain tensors, on DTensors, and of the latter in full graphs."""
    from torch.distributed.device_mesh import init_device_mesh

    biased = config(attention_bias=True, mlp_bias=True)
    plain = build_llama(biased, CACHE, REQUESTS, seed=3, shard=Shard(rank, size))
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):  # another one for each, and the same on all ranks where they share it
            generator = torch.Generator().manual_seed(len(name))
            whole = torch.randn(plain.shard.whole_shape(name, parameter), generator=generator)
            parameter.copy_(plain.shard.part(name, whole))
    model = with_dtensors(plain, init_device_mesh("cpu", (size,)))
    assert {type(parameter).__name__ for parameter in plain.parameters()} == {"Parameter"}  # left as it was
    dims = dict.fromkeys(INPUT_NAMES, 0)
    graphed = wrap(model, capture_sizes=[REQUESTS], batch_dims=dims, ranks=RankGroup(timeout=30), progress=False)
    with torch.inference_mode():
        steps = [batch(position) for position in range(6)]
        found = [(plain(*step).clone(), model(*step).clone(), graphed(*step).clone()) for step in steps]
    assert graphed.graph_stats.replays >= 4
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_the_llama_of_parallelize_module_is_the_same_model_in_eager_and_in_full_graphs(size: int) -> None:
    for found in values(run_ranks(on_dtensors, size)):
        for plain, eager, graphed in found:
            torch.testing.assert_close(eager, plain, rtol=1e-5, atol=1e-5)
            assert torch.equal(graphed, eager)


def generate(
    rank: int, size: int, device: str = "cpu", overlap: Any = "off"
) -> tuple[list[list[int]], list[list[int]], int]:
    """Return the engine's tokens, greedy and sampled without seeds, and the number of replays."""
    if device == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    model = build_llama(config(), CACHE, REQUESTS, seed=5, device=device, dtype=torch.float32, shard=Shard(rank, size))
    limits: Any = {"max_num_seqs": 4, "max_num_tokens": 32, "max_model_len": 48, "num_pages": 32}
    settings = EngineConfig(**limits, attention="sdpa", two_batch_overlap=overlap)
    engine = Engine(model, settings, RankGroup(timeout=60) if size > 1 else None)
    assert engine.capture().failed == {}
    prompts = [[(3 * index + step) % 97 for step in range(1, 4 + index)] for index in range(5)]
    tokens = engine.generate(prompts, SamplingParams(max_tokens=8))
    drawn = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=1.5))
    replays = engine.runner.manager.stats.replays
    engine.runner.manager.reset()  # before the process group goes
    return tokens, drawn, replays


def check_generated(results: list[Any], expected: list[list[int]]) -> None:
    """Each rank's of `generate`, beside one rank's greedy tokens."""
    (first, drawn, _), *_ = values(results)
    assert len({token for row in first for token in row}) > 8  # not one token over and over
    assert drawn != first
    for tokens, drawn_here, replays in results:
        assert tokens == expected
        assert drawn_here == drawn  # else the ranks would run other steps from here on
        assert replays >= 16


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_engine_generates_the_same_tokens_on_two_ranks(overlap: str) -> None:
    expected, *_ = generate(0, 1)
    check_generated(run_ranks(generate, 2, "cpu", overlap), expected)


def overlapped_steps(rank: int, size: int) -> list[Any]:
    cpu = torch.device("cpu")
    model = Workload("tiny", (1,), cpu, lm_head=True, layers=1, shard=Shard(rank, size)).build()
    return list(steps.measure(model, RankGroup(timeout=30), steps.decode_steps((2,), cpu)))


def test_steps_with_two_batch_overlap_are_measured_beside_their_collectives() -> None:
    for (found,) in values(run_ranks(overlapped_steps, 2)):
        assert found["relative_error"] < 1e-4
        assert found["ms"].keys() == {"whole", "halves", "collectives alone, eagerly"}


def torchrun(size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, env=environment, cwd=ROOT, start_new_session=True, **pipes)
    try:
        out, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # torchrun's own children too
        raise
    return subprocess.CompletedProcess(line, process.returncode, out, errors)


@pytest.mark.timeout(SECONDS + 60)
def test_the_startup_benchmark_runs_under_torchrun_and_prints_once(tmp_path: Path) -> None:
    out = tmp_path / "startup.json"
    line = ("-m", "bench", "--smoke", "--tp", "2", "--layers", "1", "--json", str(out))
    arms = ("simplegraph", "simplegraph-dtensor")
    done = torchrun(2, *line, "--arms", ",".join(arms))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on each of 2 ranks") == 1
    found = json.loads(out.read_text())
    results = found["results"]
    assert {name: result["status"] for name, result in results.items()} == dict.fromkeys(arms, "ok")
    for arm in arms:
        assert (results[arm]["tp"], results[arm]["layers"], results[arm]["details"]["captures"]) == (2, 1, 3)
        assert all(one["equal"] for one in results[arm]["correct"] if one["captured"])
    assert found["comparison"]["step_dtensor_over_plain_at_1"] > 0


@pytest.mark.timeout(SECONDS + 60)
def test_the_serving_benchmark_runs_under_torchrun_and_prints_once(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    line = ("-m", "bench.serve", "--tp", "2", "--requests", "4", "--arms", "full-and-piecewise", "--json", str(out))
    done = torchrun(2, *line)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("on 2 ranks, cpu") == 1
    found = json.loads(out.read_text())
    assert found["load"]["tp"] == 2
    assert found["results"]["full-and-piecewise"]["dropped"] == 0


def test_on_one_rank_the_arms_of_several_are_left_out_or_say_so(tmp_path: Path) -> None:
    assert not set(ALONE) & set(OF_RANKS)
    assert {*ALONE, *OF_RANKS} == set(ARMS)
    for arm in OF_RANKS:
        found = runs.run_arm(arm, runs.StartupPlan("tiny", (1,), "cpu"), str(tmp_path), 0)
        assert (found["status"], "torchrun" in found["error"]) == ("not available", True)


def test_without_torchrun_the_command_line_says_how_to_launch() -> None:
    line = [sys.executable, "-m", "bench", "--tp", "2"]
    done = subprocess.run(line, cwd=ROOT, text=True, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 2 -m bench --tp 2" in done.stderr
