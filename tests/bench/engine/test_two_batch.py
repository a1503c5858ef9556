"""The engine runs full graphs as two micro-batches: tokens and pages are those of undivided steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_engine import PAGE, SHAPE, alone, engine, prompts  # noqa: E402

from bench.engine import EngineConfig, EngineError, SamplingParams  # noqa: E402
from bench.engine.request import FinishReason  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402
from simplegraph import CudaGraphMode  # noqa: E402

FULL = CudaGraphMode.FULL
WINDOWS = {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}
KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "windows": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, WINDOWS),
}


@pytest.fixture(scope="module", params=KINDS)
def both(request: pytest.FixtureRequest) -> tuple[Any, Llama]:
    """A model of transformers, and the engine's with the same weights."""
    torch.manual_seed(0)
    config, kind, changes = KINDS[request.param]
    reference = kind(config(**SHAPE, num_hidden_layers=2, **changes)).float().eval()
    made = reference.config, CacheShape(1, PAGE), 1
    model = build_llama(*made, dtype=torch.float32, random_weights=False, windows=bool(changes))
    model.load_state_dict(reference.state_dict(), strict=False)
    return reference, model


def split_replays(served: Any) -> int:
    """Count replays of graphs that are split."""
    overlap, graphs = served.runner.overlap, served.runner.manager.stats.graphs
    return sum(graph.replays for (mode, each), graph in graphs.items() if overlap.split(mode, each))


@pytest.mark.parametrize("settings", [{"mode": "FULL"}, {"mode": "FULL_DECODE_ONLY", "fused": True}])
def test_greedy_tokens_are_those_of_transformers(both: tuple[Any, Llama], settings: dict[str, Any]) -> None:
    """Prompts run in chunks, cut between the halves; batches are padded; requests come, end and give way."""
    reference, llama = both
    served = engine(llama, two_batch_overlap="on", num_pages=24, **settings)
    asked, counts = prompts(8), [2 + 3 * (index % 5) for index in range(8)]
    found = served.generate(asked, [SamplingParams(max_tokens=count) for count in counts])
    assert found == [alone(reference, prompt, count) for prompt, count in zip(asked, counts, strict=True)]
    assert all(pages.num_free == pages.num_pages for pages in served.scheduler.groups)
    assert split_replays(served) >= 8


@pytest.mark.parametrize("both", ["windows"], indirect=True)
def test_a_request_cancelled_in_an_overlapped_step_leaves_the_others_alone(both: tuple[Any, Llama]) -> None:
    """Its pages go to others at once, and what the step under way wrote of it is in no page of theirs."""
    reference, llama = both
    served = engine(llama, mode="FULL", two_batch_overlap="on", num_pages=40)
    asked = prompts(6, seed=4, longest=12)
    requests = [served.add(prompt, SamplingParams(max_tokens=12)) for prompt in asked[:5]]
    while len(requests[4].output) < 3:
        served.step()
    assert served._under_way is not None
    before = split_replays(served)
    for gone in (requests[1], requests[4]):  # one of each half
        served.cancel(gone)
    late = served.add(asked[5], SamplingParams(max_tokens=12))
    outputs = list(served.stream())
    assert [one.request for one in outputs if one.finished is FinishReason.CANCELLED] == [requests[1], requests[4]]
    for request in (requests[0], requests[2], requests[3], late):
        assert request.output == alone(reference, request.prompt, 12)
    assert split_replays(served) > before
    assert all(pages.num_free == pages.num_pages for pages in served.scheduler.groups)


@pytest.mark.parametrize("both", ["llama"], indirect=True)
def test_only_shapes_that_are_named_are_split(both: tuple[Any, Llama]) -> None:
    reference, llama = both
    served = engine(llama, two_batch_overlap=(4,), capture_sizes=(2, 4, 8))
    assert [each.num_tokens for each in served.runner.overlap.chosen] == [4]
    asked = prompts(4)
    assert served.generate(asked, SamplingParams(max_tokens=5)) == [alone(reference, prompt, 5) for prompt in asked]
    assert split_replays(served) >= 2


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "PIECEWISE"},
        {"mode": "NONE"},
        {"compiled": True},
        {"tokens_per_launch": 4},
        {"two_batch_overlap": True},
    ],
)
def test_an_engine_that_cannot_split_its_steps_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"two_batch_overlap is .*; expected 'off', or with full graphs"):
        EngineConfig(**{"two_batch_overlap": "on"} | settings)


def test_recurrent_layers_run_in_halves() -> None:
    sizes = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 8}
    config = transformers.BambaConfig(**SHAPE, num_hidden_layers=2, **sizes)
    llama = build_llama(config, CacheShape(1, PAGE), 1, dtype=torch.float32, windows=True)
    asked, params = prompts(6), SamplingParams(max_tokens=7)
    served = engine(llama, two_batch_overlap="on", num_state_slots=5, capture_sizes=(2, 5, 24))
    assert served.generate(asked, params) == engine(llama, mode="NONE").generate(asked, params)
    assert split_replays(served) >= 6


def test_drafts_are_refused() -> None:
    with pytest.raises(EngineError, match="'off' with drafts"):
        SpecConfig(two_batch_overlap="on")
