"""The engine takes several decode steps in one graph; tokens, their order and the pages are those of single steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_engine import SHAPE, alone, engine, prompts  # noqa: E402

from bench.engine import EngineError, SamplingParams  # noqa: E402
from bench.engine.request import FinishReason  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402

STEPS = 4


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, num_hidden_layers=2)).float().eval()


@pytest.fixture(scope="module")
def llama(reference: Any) -> Llama:
    model = build_llama(reference.config, CacheShape(1, 4), 1, dtype=torch.float32, random_weights=False)
    model.load_state_dict(reference.state_dict(), strict=False)
    return model


SIZES = (1, 2, 6, 24)


def launches(served: Any) -> int:
    """Count the replays of graphs of several steps."""
    return int(served.runner.several.stats.replays)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_greedy_tokens_are_those_of_transformers(llama: Llama, reference: Any, mode: str, overlap: bool) -> None:
    served = engine(llama, mode=mode, overlap=overlap, tokens_per_launch=STEPS, capture_sizes=SIZES)
    asked, counts = prompts(8), [2 + 3 * (index % 7) for index in range(8)]
    found = served.generate(asked, [SamplingParams(max_tokens=count) for count in counts])
    assert found == [alone(reference, prompt, count) for prompt, count in zip(asked, counts, strict=True)]
    assert served.idle
    assert served.scheduler.pages.num_free == 99
    assert launches(served)


def test_most_tokens_of_a_request_are_made_in_launches(llama: Llama, reference: Any) -> None:
    served, prompt = engine(llama, tokens_per_launch=STEPS, capture_sizes=SIZES), prompts(1, seed=5)[0]
    assert served.generate([prompt], SamplingParams(max_tokens=24))[0] == alone(reference, prompt, 24)
    assert launches(served) == 5  # after the prompt's token, 20 of 23
    assert sum(served.runner.manager.stats.batch_sizes.values()) == -(-len(prompt) // 24) + 3


@pytest.mark.parametrize("at", range(6, 11))
def test_a_stop_token_within_a_launch_is_the_last(at: int, llama: Llama, reference: Any) -> None:
    prompt = prompts(1, seed=5)[0]
    expected = alone(reference, prompt, 20)
    served = engine(llama, tokens_per_launch=STEPS, capture_sizes=SIZES)
    request = served.add(prompt, SamplingParams(max_tokens=20, stop_token_ids=[expected[at]]))
    outputs = list(served.stream())
    assert [output.token for output in outputs] == request.output == expected[: expected.index(expected[at]) + 1]
    assert [output.finished for output in outputs] == [None] * (len(outputs) - 1) + [FinishReason.STOP]
    assert served.scheduler.pages.num_free == 99


def test_requests_give_way_when_pages_run_out_and_still_get_their_tokens(llama: Llama, reference: Any) -> None:
    served = engine(llama, num_pages=20, tokens_per_launch=STEPS, capture_sizes=SIZES)
    asked = prompts(6, seed=3, longest=20)
    requests = [served.add(prompt, SamplingParams(max_tokens=20)) for prompt in asked]
    list(served.stream())
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == [alone(reference, prompt, 20) for prompt in asked]
    assert served.scheduler.pages.num_free == 19


def test_requests_may_come_and_be_cancelled_while_others_run(llama: Llama, reference: Any) -> None:
    served = engine(llama, tokens_per_launch=STEPS, capture_sizes=SIZES)
    asked = prompts(8, seed=9)
    requests = []
    for index, prompt in enumerate(asked):
        requests.append(served.add(prompt, SamplingParams(max_tokens=9 + index)))
        served.step()
        served.step()
    served.cancel(requests[-1])
    list(served.stream())
    for index, request in enumerate(requests[:-1]):
        assert request.output == alone(reference, asked[index], 9 + index)
    assert requests[-1].finished is FinishReason.CANCELLED
    assert served.scheduler.pages.num_free == 99
    assert launches(served)


def test_requests_that_are_sampled_or_observed_take_single_steps(llama: Llama) -> None:
    prompt, params = prompts(1, seed=11)[0], SamplingParams(max_tokens=15, temperature=1.5, seed=4)
    served, single = engine(llama, tokens_per_launch=STEPS, capture_sizes=SIZES), engine(llama, capture_sizes=SIZES)
    assert served.generate([prompt], params) == single.generate([prompt], params)
    seen: list[Any] = []
    served.runner.observe = lambda plan, logits: seen.append(int(logits[0].argmax()))
    (tokens,) = served.generate([[5, 7, 9]], SamplingParams(max_tokens=9))
    assert seen[:9] == tokens
    assert not launches(served)


def test_what_cannot_be_is_refused(llama: Llama) -> None:
    for settings in ({"tokens_per_launch": 0}, {"tokens_per_launch": 2, "mode": "PIECEWISE"}):
        with pytest.raises(EngineError, match="tokens_per_launch is"):
            engine(llama, **settings)
    with pytest.raises(EngineError, match="tokens_per_launch is 2; expected 1"):
        SpecConfig(tokens_per_launch=2)
