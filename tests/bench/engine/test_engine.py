"""The reference engine: greedy tokens are transformers' own, whatever runs beside a request."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_engine import SHAPE, VOCAB, alone, engine, prompts  # noqa: E402

from bench.engine import Engine, EngineConfig, EngineError, RequestError, SamplingParams  # noqa: E402
from bench.engine.request import FinishReason  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402
from simplegraph import CudaGraphMode  # noqa: E402

MODES = ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"]


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(**SHAPE, num_hidden_layers=2)
    return transformers.LlamaForCausalLM(settings).float().eval()


@pytest.fixture(scope="module")
def llama(reference: Any) -> Llama:
    model = build_llama(reference.config, CacheShape(1, 4), 1, dtype=torch.float32, random_weights=False)
    model.load_state_dict(reference.state_dict(), strict=False)
    return model


@pytest.fixture(scope="module")
def served(llama: Llama) -> Engine:
    """For tests that leave it idle."""
    return engine(llama)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_layers_generate_the_same_tokens(llama: Llama) -> None:
    expected = engine(llama, mode="NONE").generate(prompts(4), SamplingParams(max_tokens=6))
    engines = [engine(llama, mode="NONE", compiled=True) for _ in range(2)]
    for one in (*engines, engines[0]):
        assert one.generate(prompts(4), SamplingParams(max_tokens=6)) == expected


def test_compiled_layers_in_emulated_graphs_are_refused(llama: Llama) -> None:
    with pytest.raises(EngineError, match="compiled is True"):
        engine(llama, compiled=True)


def test_every_step_shows_its_logits(llama: Llama) -> None:
    built = engine(llama)
    seen: list[tuple[int, int]] = []
    built.runner.observe = lambda plan, logits: seen.append((len(plan.requests), int(logits[0].argmax())))
    (tokens,) = built.generate([[5, 7, 9]], SamplingParams(max_tokens=5))
    assert [token for _, token in seen[:5]] == tokens


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_tokens_are_those_of_transformers(llama: Llama, reference: Any, mode: str, overlap: bool) -> None:
    served = engine(llama, mode=mode, overlap=overlap)
    asked = prompts(10)
    counts = [1 + 3 * (index % 7) for index in range(10)]
    params = [SamplingParams(max_tokens=count) for count in counts]
    found = served.generate(asked, params)
    assert found == [alone(reference, prompt, count) for prompt, count in zip(asked, counts, strict=True)]
    assert served.idle
    assert served.scheduler.pages.num_free == 99
    replayed = {mode for (mode, _), graph in served.runner.manager.stats.graphs.items() if graph.replays}
    assert (CudaGraphMode.FULL in replayed) == ("FULL" in mode)
    assert (CudaGraphMode.PIECEWISE in replayed) == ("PIECEWISE" in mode)


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_fused_layers_need_no_kernels_to_generate_the_same_tokens(llama: Llama, reference: Any, mode: str) -> None:
    served = engine(llama, mode=mode, fused=True)
    assert served.runner.model.fused
    assert not engine(llama, mode=mode).runner.model.fused  # on a CPU they are no gain
    found = served.generate(prompts(6), SamplingParams(max_tokens=9))
    assert found == [alone(reference, prompt, 9) for prompt in prompts(6)]


def test_fused_layers_of_a_model_that_norms_its_heads_generate_the_same_tokens() -> None:
    settings = transformers.Qwen3Config(**SHAPE, num_hidden_layers=2)
    qwen = build_llama(settings, CacheShape(1, 4), 1, dtype=torch.float32, seed=4)
    for name, weight in qwen.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    plain, fused = (engine(qwen, mode="NONE", fused=fused) for fused in (False, True))
    params = SamplingParams(max_tokens=9)
    assert fused.generate(prompts(6), params) == plain.generate(prompts(6), params)


def test_requests_give_way_when_pages_run_out_and_still_get_their_tokens(llama: Llama, reference: Any) -> None:
    served = engine(llama, num_pages=20)
    asked = prompts(6, seed=3, longest=20)
    requests = [served.add(prompt, SamplingParams(max_tokens=20)) for prompt in asked]
    for _ in served.stream():
        pass
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == [alone(reference, prompt, 20) for prompt in asked]
    assert served.scheduler.pages.num_free == 19


def test_a_stop_token_ends_a_request_and_is_its_last(llama: Llama, reference: Any) -> None:
    prompt = prompts(1, seed=5)[0]
    expected = alone(reference, prompt, 20)
    stop = expected[7]
    served = engine(llama)
    request = served.add(prompt, SamplingParams(max_tokens=20, stop_token_ids=[stop]))
    outputs = list(served.stream())
    assert request.output == expected[: expected.index(stop) + 1]
    assert [output.token for output in outputs] == request.output
    assert outputs[-1].finished is FinishReason.STOP
    assert all(output.finished is None for output in outputs[:-1])


def test_a_request_cancelled_midway_leaves_the_others_alone(llama: Llama, reference: Any) -> None:
    served = engine(llama)
    asked = prompts(5, seed=7)
    requests = [served.add(prompt, SamplingParams(max_tokens=12)) for prompt in asked]
    outputs = [output for _ in range(6) for output in served.step()]
    served.cancel(requests[2])
    served.cancel(requests[2])
    outputs += list(served.stream())
    for index, request in enumerate(requests):
        if index != 2:
            assert request.output == alone(reference, asked[index], 12)
    assert requests[2].finished is FinishReason.CANCELLED
    ends = [output for output in outputs if output.request is requests[2] and output.finished]
    assert [output.token for output in ends] == [None]
    assert served.scheduler.pages.num_free == 99


def test_requests_may_come_while_others_run(llama: Llama, reference: Any) -> None:
    served = engine(llama)
    asked = prompts(8, seed=9)
    requests = []
    for prompt in asked:
        requests.append(served.add(prompt, SamplingParams(max_tokens=9)))
        served.step()
        served.step()
    list(served.stream())
    assert [request.output for request in requests] == [alone(reference, prompt, 9) for prompt in asked]


@pytest.mark.parametrize(
    "changes", [{}, {"overlap": False}, {"num_pages": 18}, {"max_num_tokens": 7, "capture_sizes": (1, 4, 7)}], ids=str
)
@pytest.mark.parametrize("mode", MODES)
def test_seeded_requests_have_the_tokens_that_each_has_alone(llama: Llama, mode: str, changes: dict[str, Any]) -> None:
    asked = prompts(9, seed=14, longest=30)  # longer than a step: these are computed in parts
    params = [
        SamplingParams(max_tokens=15, temperature=1.5, top_k=20 * (index % 2), top_p=1 - 0.1 * (index % 3), seed=seed)
        for index, seed in enumerate([4, 4, -1, 2**63 - 1, -(2**63), 0, 7, 8, None])
    ]
    served, alone_in = engine(llama, mode=mode, **changes), engine(llama, mode="NONE", max_num_tokens=64)
    requests = []
    for prompt, one in zip(asked, params, strict=True):
        requests.append(served.add(prompt, one))
        served.step()
    list(served.stream())
    assert (sum(request.preemptions for request in requests) > 0) == ("num_pages" in changes)
    for request in requests[:-1]:
        assert request.output == alone_in.generate([request.prompt], request.params)[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_gives_a_request_the_same_tokens_whatever_runs_beside_it(llama: Llama, mode: str) -> None:
    prompt = prompts(1, seed=11)[0]
    params = SamplingParams(max_tokens=15, temperature=1.5, top_k=40, top_p=0.95, seed=4)
    lonely = engine(llama, mode=mode).generate([prompt], params)[0]
    others = prompts(5, seed=12)
    mixed = engine(llama, mode=mode).generate(
        [*others, prompt], [*[SamplingParams(max_tokens=11, temperature=1.0)] * 5, params]
    )
    assert mixed[-1] == lonely
    assert engine(llama, mode=mode).generate([prompt], SamplingParams(max_tokens=15))[0] != lonely


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([3, VOCAB], {}, f"token id {VOCAB}; expected 0 to {VOCAB - 1}"),
        ([-1], {}, "token id -1"),
        ([1] * 60, {"max_tokens": 6}, "60 tokens and max_tokens is 6.* 65 at most"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"top_k": -2}, "top_k is -2"),
        ([1], {"top_k": 2**70}, "top_k is 1180591620717411303424"),
        ([1], {"top_k": True}, "top_k is True"),
        ([1], {"seed": 2**70}, "seed is 1180591620717411303424"),
        ([1], {"seed": -(2**70)}, "seed is -1180591620717411303424"),
        ([1], {"temperature": 10**400}, "temperature is 1000"),
        ([1], {"temperature": True}, "temperature is True"),
        ([1], {"top_p": True}, "top_p is True"),
        ([1], {"stop_token_ids": [True]}, r"stop_token_ids is \[True\]"),
        ([1.5], {}, "the prompt has 1.5; expected token ids"),
        (["5"], {}, "the prompt has '5'"),
        ([True], {}, "the prompt has True"),
        ([None], {}, "the prompt has None"),
        ("text", {}, "the prompt has 't'"),
        (5, {}, "the prompt is 5; expected a list"),
        (torch.tensor([1.0]), {}, r"the prompt has tensor\(1.\)"),
        ([2**70], {}, f"token id {2**70}"),
        ([10**5000], {}, "token id a number of more than 4300 digits"),
        ([1], {"seed": 10**5000}, "seed is a number of more than 4300 digits"),
        ([1], {"max_tokens": 10**5000}, "max_tokens is a number"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_others_go_on(
    served: Engine, reference: Any, prompt: Any, params: dict[str, Any], words: str
) -> None:
    other = served.add([1, 2, 3], SamplingParams(max_tokens=5))
    served.step()
    with pytest.raises(RequestError, match=words):
        served.add(prompt, SamplingParams(**params))
    list(served.stream())
    assert other.output == alone(reference, [1, 2, 3], 5)
    assert served.idle


def test_a_request_larger_than_the_cache_is_refused(llama: Llama) -> None:
    with pytest.raises(RequestError, match="may need 10 pages of 4 tokens, the cache has 5"):
        engine(llama, num_pages=6).add([1] * 30, SamplingParams(max_tokens=11))


def test_one_bad_prompt_among_several_queues_none(served: Engine) -> None:
    with pytest.raises(RequestError):
        served.generate([[1, 2], []])
    assert served.idle


@pytest.mark.parametrize(
    "changes", [{"max_num_seqs": 0}, {"num_pages": 1}, {"max_num_tokens": 3}, {"attention": "none"}, {"page_size": 0}]
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=next(iter(changes))):
        EngineConfig(**changes)


def test_a_step_that_fails_can_be_tried_again(llama: Llama, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = engine(llama)
    request = served.add([5, 6, 7], SamplingParams(max_tokens=8))
    for _ in range(3):
        served.step()

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.runner.manager, "run", fail)
        with pytest.raises(MemoryError):
            served.step()
    list(served.stream())
    assert request.output == alone(reference, [5, 6, 7], 8)
