"""Recurrent layers beside attention in the engine: transformers' tokens, from states in slots that change owners."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

import tiny_engine  # noqa: E402
from tiny_engine import PAGE, alone, engine, prompts  # noqa: E402

from bench.engine import Engine, EngineConfig, EngineError, SamplingParams  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.engine.spec_runner import SpecRunner  # noqa: E402
from bench.models.checkpoint import load_checkpoint  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402
from simplegraph import CudaGraphMode  # noqa: E402
from tests.support.state_slots import check_continued  # noqa: E402

# Before 5.18 transformers normed all groups as one, which is right for one only.
GATED_NORM = transformers.models.bamba.modeling_bamba.BambaRMSNormGated
GROUPS = 2 if "group_size" in inspect.signature(GATED_NORM).parameters else 1
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_n_groups": GROUPS, "mamba_d_state": 8, "mamba_chunk_size": 8}
SHAPE: dict[str, Any] = tiny_engine.SHAPE | MAMBA | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]}
CONFIG = transformers.BambaConfig(**SHAPE)
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@pytest.fixture(scope="module")
def both() -> tuple[Any, Llama]:
    """A Bamba of transformers, and the engine's with the same weights."""
    torch.manual_seed(0)
    reference = transformers.BambaForCausalLM(CONFIG).float().eval()
    with torch.no_grad():
        for layer in reference.model.layers:
            if hasattr(layer, "mamba"):  # states that last, and heads that differ
                layer.mamba.A_log.copy_(torch.linspace(-3, 1, 4))
                layer.mamba.dt_bias.copy_(torch.linspace(-3, 1, 4))
                layer.mamba.D.copy_(torch.linspace(-1, 2, 4))
    model = build_llama(CONFIG, CacheShape(1, PAGE), 1, dtype=torch.float32, random_weights=False, windows=True)
    weights = {model.own_name(name): weight for name, weight in reference.state_dict().items()}
    missing, unknown = model.load_state_dict(weights, strict=False)
    assert not unknown
    assert not [name for name in missing if "cache" not in name and "inv_freq" not in name and "start" not in name]
    return reference, model


@pytest.fixture(scope="module")
def expected(both: tuple[Any, Llama]) -> list[list[int]]:
    """The tokens of the requests of `asked`."""
    return [alone(both[0], prompt, params.max_tokens) for prompt, params in asked()]


def asked() -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, SamplingParams(max_tokens=1 + 3 * (index % 7))) for index, prompt in enumerate(prompts(12))]


def check_states(served: Engine) -> None:
    """Before every step fill the states of slots that nobody owns with NaN, and check that each request goes on."""
    states, schedule = served.runner.states, served.scheduler.schedule
    assert states is not None
    check_continued(states.metadata)

    def poisoned() -> Any:
        plan = schedule()
        for tensor in states.cache.tensors:
            tensor[:, [slot + 1 for slot in served.scheduler._slots]] = torch.nan
        return plan

    served.scheduler.schedule = poisoned  # type: ignore[method-assign]


def generate(served: Engine) -> list[list[int]]:
    check_states(served)
    listed, params = zip(*asked(), strict=True)
    found = served.generate(listed, params)
    states = served.runner.states
    assert states is not None
    assert not any(tensor[:, 0].any() for tensor in states.cache.tensors)  # what padding reads
    return found


@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_transformers(both: tuple[Any, Llama], expected: list[list[int]], mode: str) -> None:
    """Prompts run in chunks, requests follow each other in the slots, and padded batches change no state."""
    served = engine(both[1], mode=mode)
    assert generate(served) == expected
    replayed = {mode for (mode, _), graph in served.runner.manager.stats.graphs.items() if graph.replays}
    assert (CudaGraphMode.FULL in replayed) == ("FULL" in mode)
    assert (CudaGraphMode.PIECEWISE in replayed) == ("PIECEWISE" in mode)
    reasons = {reason.name for reason in served.runner.manager.stats.eager}
    assert reasons <= ({"SWITCHED_OFF"} if mode == "NONE" else {"MIXED_BATCH"} if mode == "FULL_DECODE_ONLY" else set())


@pytest.mark.parametrize("rotated", [0.5, 1.0])
def test_fused_layers_are_replayed_and_give_the_tokens_of_plain_ones(rotated: float) -> None:
    """Whether the fused kernel or the model rotates heads, the layers keep no tensor of a capture."""
    config = transformers.BambaConfig(**SHAPE | {"partial_rotary_factor": rotated})
    model = build_llama(config, CacheShape(1, PAGE), 1, dtype=torch.float32, windows=True, seed=4)
    plain, fused = engine(model, mode="NONE"), engine(model, fused=True)
    assert generate(fused) == generate(plain)
    assert not fused.runner.manager.failures
    assert not fused.runner.manager.stats.eager


def test_requests_that_give_way_begin_again(both: tuple[Any, Llama], expected: list[list[int]]) -> None:
    served = engine(both[1], num_pages=14)
    preempt, count = served.scheduler._preempt, []
    served.scheduler._preempt = lambda request: (count.append(request), preempt(request))[1]  # type: ignore[method-assign]
    assert generate(served) == expected
    assert count


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_more_requests_than_state_slots_wait(both: tuple[Any, Llama], expected: list[list[int]], slots: int) -> None:
    """No graph is captured for more requests than have states, and every request gets its own tokens."""
    served = engine(both[1], num_state_slots=slots)
    running = []
    schedule = served.scheduler.schedule
    served.scheduler.schedule = lambda: (schedule(), running.append(len(served.scheduler.running)))[0]  # type: ignore[method-assign]
    assert generate(served) == expected
    assert max(running) == slots
    decode = {key.num_tokens for mode, key in served.runner.manager.programs if mode is CudaGraphMode.FULL}
    assert decode == {size for size in (1, 2, 4) if size <= slots} | {slots}
    assert max(key.num_tokens for _, key in served.runner.manager.programs) == 24
    states = served.runner.states
    assert states is not None
    assert states.cache.num_slots == slots


def test_a_step_that_fails_midway_leaves_no_token_twice_in_a_state(
    both: tuple[Any, Llama], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first layers ran: their states have advanced, so its requests begin again."""
    served = engine(both[1], mode="NONE")
    states = served.runner.states
    assert states is not None
    run, steps = states.run, []

    def fail_at_times(layer: int, *arguments: Any) -> None:
        steps.append(layer)
        if layer == 2 and len(steps) % 9 == 0:
            raise MemoryError("no memory")
        run(layer, *arguments)

    monkeypatch.setattr(states, "run", fail_at_times)
    check_states(served)
    requests = [served.add(prompt, params) for prompt, params in asked()]
    failed = 0
    while not served.idle:
        try:
            served.step()
        except MemoryError:
            failed += 1
            if failed == 4:
                monkeypatch.setattr(states, "run", run)
    assert failed >= 3
    assert [request.output for request in requests] == expected


def test_a_request_cancelled_midway_leaves_the_others_alone(both: tuple[Any, Llama], expected: list[list[int]]) -> None:
    served = engine(both[1])
    check_states(served)
    requests = [served.add(prompt, params) for prompt, params in asked()]
    for _ in range(4):
        served.step()
    served.cancel(requests[3])
    list(served.stream())
    for index, (request, tokens) in enumerate(zip(requests, expected, strict=True)):
        assert request.output == tokens if index != 3 else len(request.output) < len(tokens)


def test_speculation_is_refused_with_the_reason(both: tuple[Any, Llama]) -> None:
    draft: Any = None
    words = (
        r"recurrent layers is \[0, 2\]; expected none: a state cannot go back to where it was before rejected tokens"
    )
    with pytest.raises(EngineError, match=words):
        SpecRunner(both[1], draft, SpecConfig(max_num_tokens=512))


def test_a_model_without_attention_is_refused() -> None:
    config = transformers.BambaConfig(**SHAPE | {"attn_layer_indices": None})
    model = build_llama(config, CacheShape(1, PAGE), 1, dtype=torch.float32, windows=True)
    with pytest.raises(EngineError, match="layers is 'recurrent'; expected some with attention"):
        engine(model)


def test_a_step_that_knows_no_states_is_refused(both: tuple[Any, Llama]) -> None:
    ids, lengths = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with torch.inference_mode(), pytest.raises(ValueError, match="layer 0 is recurrent; LlamaDecodeStep has no states"):
        both[1](ids, ids, ids, lengths, table)
    with pytest.raises(ValueError, match="or recurrent layers"):
        build_llama(CONFIG, CacheShape(1, PAGE), 1)


def test_a_checkpoint_has_the_names_of_transformers(both: tuple[Any, Llama], tmp_path: Path) -> None:
    both[0].save_pretrained(tmp_path)
    loaded = build_llama(CONFIG, CacheShape(1, PAGE), 1, dtype=torch.float32, windows=True, seed=5)
    load_checkpoint(loaded, tmp_path)
    for mine, theirs in zip(loaded.parameters(), both[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_slots_that_are_none_are_refused() -> None:
    with pytest.raises(EngineError, match="num_state_slots is 0; expected at least 1"):
        EngineConfig(num_state_slots=0)


def test_random_states_last(both: tuple[Any, Llama]) -> None:
    """Weights drawn for benchmarks keep states of a thousand tokens and of few, as trained ones do."""
    model = build_llama(CONFIG, CacheShape(1, PAGE), 1, dtype=torch.float32, windows=True)
    mamba = model.model.recurrences[0]
    kept = torch.exp(-torch.nn.functional.softplus(mamba.dt_bias) * mamba.A_log.exp())
    assert float(kept.max()) == pytest.approx(0.999, abs=1e-3)
    assert float(kept.min()) < 0.7
