"""Speculative decoding on a GPU: the plain engine's tokens, one acceptance in every mode, chained drafts."""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from padding import assert_nothing_was_padded, sizes_of_steps  # noqa: E402

from bench.engine import Engine, EngineConfig, EngineError, SamplingParams  # noqa: E402
from bench.engine.spec import SpecEngine  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.models.eagle import Eagle, Eagle3, tiny_pair  # noqa: E402
from bench.models.llama import Llama  # noqa: E402
from bench.models.serving import ServingLlama  # noqa: E402
from bench.serve import __main__ as serve  # noqa: E402
from bench.tools import text  # noqa: E402
from simplegraph import BatchDescriptor, CudaGraphManager, CudaGraphMode  # noqa: E402
from simplegraph.attention import BatchMetadata, PagedKVCache, SDPABackend, attending  # noqa: E402
from simplegraph.spec_decode import EagleDrafter, greedy_accept, rejection_sample  # noqa: E402

FUSED = importlib.util.find_spec("triton") is not None
MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_tokens": 1024,
    "max_model_len": 160,
    "num_pages": 1000,
    "capture_sizes": (1, 2, 4, 8, 16, 32, 64),
}


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    faulthandler.dump_traceback_later(280, exit=True)  # a replay that was never planned can loop for ever
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


def prompts(count: int, longest: int = 60) -> list[list[int]]:
    draw = random.Random(0)
    return [
        text.token_ids(draw.randint(1, longest), 256, start=draw.randrange(8000)).tolist()
        if index % 4
        else [draw.randrange(256) for _ in range(draw.randint(1, longest))]
        for index in range(count)
    ]


def plain(target: Llama, asked: list[list[int]], params: Any, **changes: Any) -> list[list[int]]:
    settings = {**SETTINGS, "mode": "NONE", "capture_sizes": None} | changes
    return Engine(target, EngineConfig(**settings)).generate(asked, params)


def speculating(models: tuple[Llama, Eagle | Eagle3], **changes: Any) -> SpecEngine:
    served = SpecEngine(*models, SpecConfig(**{**SETTINGS, "num_draft_tokens": 5} | changes))
    assert all(summary.failed == {} for summary in served.capture())
    return served


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_two_hundred_prompts_get_the_plain_engines_tokens_and_one_acceptance_in_every_mode(kind: str) -> None:
    """Every size that occurs is captured, so that all modes multiply the same shapes, hence by the same kernels."""
    assert torch.get_float32_matmul_precision() == "highest"  # no TF32
    models = tiny_pair(kind, device="cuda")
    asked, params = two_hundred()
    expected = plain(models[0], asked, params, attention="sdpa")
    eager = speculating(models, mode="NONE", attention="sdpa")
    sizes = sizes_of_steps(eager)
    assert eager.generate(asked, params) == expected
    assert {1, 64} <= sizes["capture_sizes"]
    for mode in MODES[1:]:
        served = speculating(models, mode=mode, attention="sdpa", **sizes)
        assert served.generate(asked, params) == expected, mode
        assert_nothing_was_padded(served)
        assert served.acceptance == eager.acceptance, mode
        served.runner.reset()
    assert eager.acceptance.mean_length > 1.5
    assert all(0 < rate < 1 for rate in eager.acceptance.rates)


@pytest.mark.parametrize("mode", MODES[1:])
def test_padding_changes_no_token_and_acceptance_by_rounding_only(mode: str) -> None:
    models = tiny_pair("eagle3", device="cuda")
    asked, params = two_hundred()
    eager = speculating(models, mode="NONE", attention="sdpa")
    expected = eager.generate(asked, params)
    assert expected == plain(models[0], asked, params, attention="sdpa")
    served = speculating(models, mode=mode, attention="sdpa")
    assert served.generate(asked, params) == expected
    full = [
        graph.replays for key, graph in served.runner.managers[5].stats.graphs.items() if key[0] is CudaGraphMode.FULL
    ]
    assert (sum(full) > 0) == ("FULL" in mode)
    assert served.runner.managers[5].stats.padded_tokens > 0
    # Other shapes are other kernels, whose rounding decides a draft's near ties, about once in ten thousand drafts.
    # From there on a request's rounds begin elsewhere: two such requests are a hundredth of all rounds.
    assert served.acceptance.rates == pytest.approx(eager.acceptance.rates, abs=0.01)
    served.runner.reset()


def two_hundred() -> tuple[list[list[int]], list[SamplingParams]]:
    draw = random.Random(1)
    params = [SamplingParams(max_tokens=draw.randint(1, 60)) for _ in range(200)]
    params[-1] = SamplingParams(max_tokens=95)  # the last one runs alone
    return prompts(200), params


def test_sampled_tokens_and_k_changing_at_run_time_are_the_same_in_every_mode() -> None:
    models = tiny_pair("eagle3", device="cuda")
    asked = prompts(24)
    params = [SamplingParams(max_tokens=30, temperature=0.7 * (index % 3)) for index in range(24)]
    found = []
    for mode in ("NONE", "FULL_AND_PIECEWISE"):
        torch.manual_seed(3)
        served = speculating(models, mode=mode, attention="sdpa", acceptance="rejection", num_draft_tokens=(5, 2))
        requests = [served.add(prompt, one) for prompt, one in zip(asked, params, strict=True)]
        for index in range(200):
            served.num_draft_tokens = (5, 2)[index % 3 == 0]
            served.step()
        assert served.idle
        found.append([request.output for request in requests])
        served.runner.reset()
    assert found[0] == found[1]


@pytest.mark.parametrize("attention", ["fa3", "flashinfer"])
def test_bfloat16_tokens_agree_with_the_plain_engine_and_acceptance_with_eager(attention: str) -> None:
    models = tiny_pair("eagle3", device="cuda", dtype=torch.bfloat16)
    asked, params = prompts(48), SamplingParams(max_tokens=32)
    try:
        eager = speculating(models, mode="NONE", attention=attention, fused=False)
    except EngineError as error:
        pytest.skip(str(error))
    eager.generate(asked, params)
    expected = plain(models[0], asked, params, attention=attention, fused=False)
    served = speculating(models, attention=attention, fused=False)
    found = served.generate(asked, params)
    # Rounding decides near ties, and one other token changes all that follow.
    same = sum(one[:8] == other[:8] for one, other in zip(found, expected, strict=True))
    assert same >= 30
    assert served.acceptance.mean_length == pytest.approx(eager.acceptance.mean_length, abs=0.15)
    assert served.acceptance.mean_length > 1.5
    served.runner.reset()


@pytest.mark.parametrize("attention", ["sdpa", "fa3", "flashinfer"])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_graphs_drafts_are_eagers(attention: str, count: int) -> None:
    """From one state, in a shape that was captured exactly: the same kernels, so the same drafts."""
    dtype = torch.float32 if attention == "sdpa" else torch.bfloat16
    models = tiny_pair("eagle3", device="cuda", dtype=dtype)
    try:
        served = speculating(models, attention=attention, fused=False)
    except EngineError as error:
        pytest.skip(str(error))
    for prompt in prompts(count):
        served.add(prompt, SamplingParams(max_tokens=90))
    runner, graphs = served.runner, served.runner.drafters[5]
    eager = EagleDrafter(
        models[1], *runner._draft_backends, runner.proposals, num_draft_tokens=5, mode="NONE", pool=None
    )
    while len(served.scheduler.drafted) < count:
        served.step()
    seen = set()
    for _ in range(6):
        served.step()
        drafted = served.scheduler.schedule_round(5)
        assert drafted is not None
        runner.launch_round(drafted).wait()
        slots = torch.as_tensor(drafted.slots, device="cuda")
        found = runner.proposals.tokens[slots].clone()
        buffers, rows = graphs._buffers, 6 * count
        with torch.inference_mode():
            eager.load(
                buffers.input_ids[:rows],
                buffers.positions[:rows],
                buffers.states[:rows],
                buffers.last[:count],
                buffers.slots[:count],
            )
            runner.metadata.repeat()
            runner.proposals.tokens.fill_(-1)
            eager.draft(rows, count, 6)
        agreeing = float((runner.proposals.tokens[slots] == found).double().mean())
        # FlashInfer splits the lengths in a graph where it does not eagerly, and rounding decides near ties.
        assert agreeing >= (0.7 if attention == "flashinfer" else 1)
        seen |= set(found.flatten().tolist())
    assert len(seen) > 3
    runner.reset()


@pytest.mark.skipif(not FUSED, reason="needs Triton")
def test_the_states_that_fused_layers_give_a_draft_are_the_plain_ones() -> None:
    target, _ = tiny_pair("eagle3", device="cuda", dtype=torch.bfloat16)
    results = []
    for fused in (False, True):
        cache = PagedKVCache(2, 20, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
        metadata = BatchMetadata(max_num_tokens=64, max_num_reqs=4, max_model_len=64, page_size=16, device="cuda")
        backend = SDPABackend(cache, metadata, num_heads=2)
        served = ServingLlama(target, backend, 64, fused=fused)
        metadata.set([40], [40], [[3, 1, 2]])
        taps: dict[int, torch.Tensor] = {}
        with torch.inference_mode(), attending(backend, CudaGraphMode.NONE, BatchDescriptor(40, 1)):
            hidden = served(
                text.token_ids(40, 256).cuda(),
                torch.arange(40, device="cuda"),
                lambda layer, state, taps=taps: taps.update({layer: state.clone()}),
            )
        results.append([taps[0].double(), taps[1].double(), hidden.double()])
    for plain_states, fused_states in zip(*results, strict=True):
        assert float((plain_states - fused_states).norm() / plain_states.norm()) < 2e-2


def test_acceptance_in_a_graph_is_that_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    count, vocab = 16, 50
    inputs = {
        "drafts": torch.randint(-1, vocab, (count, 4), generator=generator),
        "p": torch.randn(count, 5, vocab, generator=generator).mul(3).softmax(-1),
        "q": torch.randn(count, 4, vocab, generator=generator).mul(3).softmax(-1),
        "noise": torch.rand(count, 5, generator=generator),
    }
    static = {name: tensor.cuda() for name, tensor in inputs.items()}
    manager = CudaGraphManager(device="cuda", capture_sizes=[count])

    def on(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        drafts, p, q, noise = tensors.values()
        found = [
            greedy_accept(drafts, p.argmax(-1)),
            rejection_sample(drafts, p, noise),
        ]
        found.append(rejection_sample(drafts, p, noise, q))
        return [part for accepted in found for part in accepted]

    with torch.inference_mode():
        assert manager.capture(lambda mode, descriptor: on(static)).failed == {}
        for seed in range(5):
            generator.manual_seed(seed)
            inputs["noise"] = torch.rand(count, 5, generator=generator)
            inputs["drafts"] = torch.where(
                torch.rand(count, 4, generator=generator) < 0.6, inputs["p"][:, :4].argmax(-1), inputs["drafts"]
            )
            for name, tensor in inputs.items():
                static[name].copy_(tensor)
            found = manager.run(manager.dispatch(count), lambda mode, descriptor: on(static))
            for one, other in zip(found, on(inputs), strict=True):
                assert torch.equal(one.cpu(), other)


def test_rejection_sampling_keeps_the_targets_distribution_on_the_gpu() -> None:
    count, vocab = 400_000, 6
    generator = torch.Generator("cuda").manual_seed(4)
    p, q = (torch.randn(vocab, device="cuda", generator=generator).softmax(-1) for _ in range(2))
    drafts = q.expand(count, -1).multinomial(1, generator=generator)
    noise = torch.rand(count, 2, device="cuda", generator=generator)
    targets = p.expand(count, 2, -1)
    for proposed in (q.expand(count, 1, -1), None):
        accepted = rejection_sample(drafts if proposed is not None else drafts * 0 + 2, targets, noise, proposed)
        found = accepted.tokens[:, 0].bincount(minlength=vocab).double()
        expected = p.double() * count
        assert float(((found - expected) ** 2 / expected).sum()) < 20.5  # 5 degrees of freedom: once in a thousand
        assert 0 < int(accepted.counts.sum()) < count


def test_loads_are_served_with_the_drafts_own_acceptance_in_every_mode(tmp_path: Path) -> None:
    arms = "full-and-piecewise,speculation-draft-eager,speculation-draft-piecewise,speculation-draft-full"
    arguments = ["--model", "trained", "--rate", "100,inf", "--in-flight", "2", "--requests", "12", "--arms", arms]
    assert serve.main([*arguments, "--json", str(tmp_path / "serve.json")]) == 0
    found = json.loads((tmp_path / "serve.json").read_text())["results"]
    assert len(found) == 12
    lengths = [row["mean_length"] for row in found.values() if "mean_length" in row]
    assert len(lengths) == 9
    # Padded batches are rounded otherwise, which decides a draft's near tie now and then.
    assert lengths == pytest.approx([lengths[0]] * 9, abs=0.05)
    assert all(row["preemptions"] == 0 for row in found.values())
