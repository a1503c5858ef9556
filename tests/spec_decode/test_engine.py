"""Speculation changes how fast tokens come, never which: a trained draft and a blind one against the plain engine."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from padding import assert_nothing_was_padded, sizes_of_steps  # noqa: E402

from bench.engine import Engine, EngineConfig, EngineError, RequestError, SamplingParams  # noqa: E402
from bench.engine.request import FinishReason  # noqa: E402
from bench.engine.spec import Acceptance, SpecEngine  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.models.eagle import build_eagle, tiny_pair  # noqa: E402
from bench.tools import text  # noqa: E402
from simplegraph import CudaGraphMode  # noqa: E402

MODES = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 6,
    "max_num_tokens": 48,
    "max_model_len": 96,
    "num_pages": 150,
    "page_size": 8,
    "attention": "sdpa",
    "capture_sizes": (2, 6),
}
K = 3
MIXED: dict[str, Any] = {"mixed_capture_sizes": (8, 48)}  # few, since an emulated capture takes long


@pytest.fixture(scope="module")
def pairs() -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {kind: tiny_pair(kind, device=device) for kind in ("eagle", "eagle3")}
    target = found["eagle"][0]
    return found | {"blind": (target, build_eagle("eagle3", target, draft_vocab_size=64))}


def prompts(count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Pieces of the text that the target knows, and some noise."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        length = draw.randint(1, longest)
        piece = text.token_ids(length, 256, start=draw.randrange(8000)).tolist()
        found.append(piece if index % 4 else [draw.randrange(256) for _ in range(length)])
    return found


def plain(target: Any, asked: list[list[int]], params: Any, **changes: Any) -> list[list[int]]:
    settings = {**SETTINGS, "mode": "NONE", "capture_sizes": None} | changes
    return Engine(target, EngineConfig(**settings)).generate(asked, params)


def speculating(pair: Any, **changes: Any) -> SpecEngine:
    served = SpecEngine(*pair, SpecConfig(**{**SETTINGS, **MIXED, "num_draft_tokens": K} | changes))
    assert all(summary.failed == {} for summary in served.capture())
    return served


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "blind"])
def test_greedy_tokens_are_those_without_speculation_in_every_mode(pairs: dict[str, Any], kind: str) -> None:
    asked = prompts(14)
    params = [SamplingParams(max_tokens=1 + 7 * (index % 7)) for index in range(14)]
    expected = plain(pairs[kind][0], asked, params)
    counted = []
    for mode in MODES:
        served = speculating(pairs[kind], mode=mode)
        assert served.generate(asked, params) == expected, mode
        assert served.idle
        assert served.scheduler.pages.num_free == 149
        counted.append(served.acceptance)
        replayed = {mode for (mode, _), graph in served.runner.managers[K].stats.graphs.items() if graph.replays}
        assert (CudaGraphMode.FULL in replayed) == ("FULL" in mode)
        assert (CudaGraphMode.PIECEWISE in replayed) == ("PIECEWISE" in mode)
    # The same drafts, so the same ones taken in each place.
    assert counted == [counted[0]] * len(MODES)
    found: Acceptance = counted[0]
    assert found.accepted == sum(found.per_position)
    assert found.draft_tokens == K * found.drafts
    if kind == "blind":
        assert found.mean_length < 1.2
    else:
        assert found.mean_length > 2
        assert all(0 < rate < 1 for rate in found.rates)


@pytest.mark.timeout(600)
def test_two_hundred_prompts_in_batches_of_one_to_sixty_four(pairs: dict[str, Any]) -> None:
    settings = {"max_num_seqs": 64, "max_num_tokens": 1024, "num_pages": 1200, "capture_sizes": (1, 4, 16, 64)}
    asked = prompts(200, longest=24)
    draw = random.Random(1)
    # The first 64 begin together, and none of them ends before a round of all.
    params = [SamplingParams(max_tokens=draw.randint(1 if index > 63 else 8, 32)) for index in range(200)]
    params[-1] = SamplingParams(max_tokens=60)  # the last one runs alone
    expected = plain(pairs["eagle"][0], asked, params, **settings | {"capture_sizes": None})
    served = speculating(pairs["eagle"], mode="FULL_AND_PIECEWISE", **settings)
    sizes = set()
    requests = [served.add(prompt, one) for prompt, one in zip(asked, params, strict=True)]
    while not served.idle:
        sizes.add(len(served.scheduler.drafted))
        served.step()
    assert [request.output for request in requests] == expected
    assert {1, 64} <= sizes
    assert all(rate > 0 for rate in served.acceptance.rates)


@pytest.mark.parametrize("modes", [("NONE", "FULL_DECODE_ONLY"), ("FULL_DECODE_ONLY", "NONE"), ("PIECEWISE", "NONE")])
def test_target_and_draft_may_run_in_different_modes(pairs: dict[str, Any], modes: tuple[str, str]) -> None:
    asked, params = prompts(7, seed=2), SamplingParams(max_tokens=20)
    mode, draft_mode = modes
    served = speculating(pairs["eagle3"], mode=mode, draft_mode=draft_mode, capture_sizes=(2, 6))
    assert served.generate(asked, params) == plain(pairs["eagle3"][0], asked, params)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_any_number_of_drafts_gives_the_same_tokens(pairs: dict[str, Any], count: int) -> None:
    asked, params = prompts(7, seed=3), SamplingParams(max_tokens=25)
    served = speculating(pairs["eagle"], num_draft_tokens=count, max_num_tokens=64)
    assert served.generate(asked, params) == plain(pairs["eagle"][0], asked, params)
    assert len(served.acceptance.per_position) == count


def products(served: SpecEngine, asked: list[list[int]], params: Any) -> list[tuple[Any, ...]]:
    """The shapes of every matrix product of a generation, replayed ones included: of what came in, and of the result.

    A linear layer is one operator in an eager step, and the matrix product that it consists of in an emulated graph.
    """
    found = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            if function in (torch.ops.aten.linear.default, torch.ops.aten.mm.default):
                found.append((tuple(args[0].shape), tuple(result.shape)))
            return result

    with Shapes():
        served.generate(asked, params)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a replay on a GPU shows none of its operators")
def test_no_mode_pads_anything_where_every_size_is_captured(pairs: dict[str, Any]) -> None:
    """Matrix products of other shapes round otherwise on a GPU, and a draft's near tie may go the other way."""
    asked = [prompt[:5] for prompt in prompts(6, seed=14)]
    params = [SamplingParams(max_tokens=4 + 3 * index) for index in range(6)]
    settings = {"max_num_seqs": 4, "max_model_len": 40}
    eager = speculating(pairs["eagle3"], mode="NONE", **settings)
    sizes = sizes_of_steps(eager)
    expected = products(eager, asked, params)
    assert sizes["capture_sizes"] == {1, 2, 3, 4}
    assert len(expected) > 250
    for mode in MODES[1:]:
        served = speculating(pairs["eagle3"], mode=mode, **settings | sizes)
        assert products(served, asked, params) == expected, mode
        assert_nothing_was_padded(served)
    # What it would see: the same in graphs for four requests only.
    served = speculating(pairs["eagle3"], mode="FULL_DECODE_ONLY", **settings | {"capture_sizes": (4,)})
    assert products(served, asked, params) != expected
    with pytest.raises(AssertionError):
        assert_nothing_was_padded(served)


def test_k_may_change_while_requests_run(pairs: dict[str, Any]) -> None:
    asked, params = prompts(6, seed=4), SamplingParams(max_tokens=40)
    served = speculating(pairs["eagle"], num_draft_tokens=(K, 1, 2))
    requests = [served.add(prompt, params) for prompt in asked]
    for count in (K, 1, K, 2, 1) * 24:
        served.num_draft_tokens = count
        served.step()
    assert served.idle
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)
    for count, manager in served.runner.managers.items():
        full = sum(graph.replays for (mode, _), graph in manager.stats.graphs.items() if mode is CudaGraphMode.FULL)
        assert full > 0, count
        assert manager.pool is served.runner.managers[K].pool
    with pytest.raises(EngineError, match="num_draft_tokens is 4; expected one of 3, 1, 2"):
        served.num_draft_tokens = 4


def test_requests_at_their_limit_end_there_and_the_others_go_on(pairs: dict[str, Any]) -> None:
    asked = [prompts(1, longest=1)[0] * 30, prompts(1)[0][:4], [7] * 12]
    params = [SamplingParams(max_tokens=count) for count in (11, 30, 29)]
    settings = {"max_model_len": 40, "max_num_seqs": 3, "capture_sizes": (1, 2, 3)}
    served = speculating(pairs["eagle"], **settings)
    found = served.generate(asked, params)
    assert found == plain(pairs["eagle"][0], asked, params, **settings | {"capture_sizes": None})
    assert len(asked[0]) + len(found[0]) == 41  # the last token is never run through the model


def test_requests_that_give_way_get_the_same_tokens(pairs: dict[str, Any]) -> None:
    asked, params = prompts(6, seed=5, longest=20), SamplingParams(max_tokens=40)
    served = speculating(pairs["eagle"], num_pages=24)
    requests = [served.add(prompt, params) for prompt in asked]
    list(served.stream())
    assert sum(request.preemptions for request in requests) > 0
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)
    assert served.scheduler.pages.num_free == 23


def test_requests_may_come_and_go_while_others_run(pairs: dict[str, Any]) -> None:
    asked, params = prompts(9, seed=6), SamplingParams(max_tokens=15)
    served = speculating(pairs["eagle3"])
    requests, outputs = [], []
    for prompt in asked:
        requests.append(served.add(prompt, params))
        outputs += served.step()
    served.cancel(requests[-1])
    outputs += list(served.stream())
    assert [request.output for request in requests[:-1]] == plain(pairs["eagle3"][0], asked[:-1], params)
    ends = [output for output in outputs if output.request is requests[-1] and output.finished]
    assert [output.finished for output in ends] == [FinishReason.CANCELLED]
    assert served.scheduler.pages.num_free == 149


@pytest.mark.parametrize("mode", MODES)
def test_a_request_grows_beside_others_prompts_as_it_does_alone(pairs: dict[str, Any], mode: str) -> None:
    asked = [prompts(4, seed=9)[3], [5, 9] * 40, *prompts(4, seed=10)]  # the second takes two steps
    params = [SamplingParams(max_tokens=count) for count in (40, 12, 9, 3, 20, 7)]
    served = speculating(pairs["eagle3"], mode=mode)
    alone, _ = growth(served, asked[:1], params)
    beside, requests = growth(served, asked, params)
    assert len(alone) > 8
    assert min(alone) >= 1
    assert beside[: len(alone)] == alone  # no step without its tokens, and drafts as good
    assert [request.output for request in requests] == plain(pairs["eagle3"][0], asked, params)


def growth(served: SpecEngine, asked: list[list[int]], params: list[SamplingParams]) -> tuple[list[int], list[Any]]:
    """Generate; return how many tokens each step gave the first request. After its prompt every step brings another."""
    counts, requests, late = [], [served.add(asked[0], params[0])], list(zip(asked, params, strict=False))[1:]
    while not served.idle:
        if requests[0].output and late:
            requests.append(served.add(*late.pop(0)))
        counts.append(sum(output.request is requests[0] for output in served.step()))
    return counts, requests


def test_a_stop_token_within_a_round_ends_the_request_there(pairs: dict[str, Any]) -> None:
    prompt = prompts(4, seed=7)[3]
    expected = plain(pairs["eagle"][0], [prompt], SamplingParams(max_tokens=30))[0]
    stop = expected[13]
    params = SamplingParams(max_tokens=30, stop_token_ids=[stop])
    assert speculating(pairs["eagle"]).generate([prompt], params)[0] == expected[: expected.index(stop) + 1]


def test_a_round_that_fails_can_be_tried_again(pairs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, params = prompts(3, seed=8), SamplingParams(max_tokens=20)
    served = speculating(pairs["eagle"])
    requests = [served.add(prompt, params) for prompt in asked]
    for _ in range(3):
        served.step()

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    for failing in (served.runner.managers[K], served.runner.drafters[K].prefill_manager):
        with monkeypatch.context() as patch:
            patch.setattr(failing, "run", fail)
            with pytest.raises(MemoryError):
                served.step()
    list(served.stream())
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_step_that_fails_while_its_tokens_arrive_can_be_tried_again(
    pairs: dict[str, Any], failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, params = prompts(3, seed=8), SamplingParams(max_tokens=20)
    served = speculating(pairs["eagle"], mode="NONE")
    requests = [served.add(asked[0], params)]
    while requests[0] not in served.scheduler.drafted:
        served.step()
    requests += [served.add(prompt, params) for prompt in asked[1:]]
    wait, calls = served.runner.wait, itertools.count(1)

    def fail(arriving: Any) -> Any:
        if next(calls) == failing:  # of the prompts' tokens, or of the round's beside them
            raise KeyboardInterrupt
        return wait(arriving)

    with monkeypatch.context() as patch:
        patch.setattr(served.runner, "wait", fail)
        with pytest.raises(KeyboardInterrupt):
            served.step()
    list(served.stream())
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)
    assert served.scheduler.pages.num_free == served.config.num_pages - 1


def test_rounds_of_the_same_requests_and_pages_are_not_set_again(
    pairs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, params = prompts(3, seed=15), SamplingParams(max_tokens=48)
    served = speculating(pairs["eagle"], mode="FULL_DECODE_ONLY")
    metadata, inputs = served.runner.metadata, served.runner._inputs
    calls: Counter[str] = Counter()

    def counted(thing: Any, name: str) -> None:
        original = getattr(thing, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(thing, name, call)

    requests = [served.add(prompt, params) for prompt in asked]
    while len(served.scheduler.drafted) < 3:
        served.step()
    for thing, name in ((metadata, "set"), (metadata, "advance"), (inputs, "load_round")):
        counted(thing, name)
    rounds = 0
    while not served.idle:
        served.step()
        rounds += 1
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)
    assert calls["set"] == calls["load_round"] < rounds / 2
    assert calls["advance"] == rounds - calls["set"] > 5


def test_a_round_that_nobody_took_is_not_gone_on_from(pairs: dict[str, Any]) -> None:
    asked, params = prompts(3, seed=16), SamplingParams(max_tokens=40)
    served = speculating(pairs["eagle"])
    requests = [served.add(prompt, params) for prompt in asked]
    while not served.idle:
        served.step()
        drafted = served.scheduler.schedule_round(K)
        if drafted is not None and len(requests[0].output) % 2:
            served.runner.launch_round(drafted).wait()  # the device is a round further than the requests are
    # Each such round drafted from wrong states; whether those drafts are refused or taken, no token changes.
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_graphs_may_be_captured_between_rounds(pairs: dict[str, Any], mode: str) -> None:
    asked, params = prompts(3, seed=18), SamplingParams(max_tokens=40)
    served = speculating(pairs["eagle"], mode=mode)
    requests = [served.add(prompt, params) for prompt in asked]
    while not served.idle:
        served.step()
        if len(requests[0].output) % 3 == 0:
            served.capture()
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params)


def test_pages_for_rounds_to_come_are_taken_only_where_there_are_plenty(pairs: dict[str, Any]) -> None:
    served = speculating(pairs["eagle"], num_pages=150)
    requests = [served.add(prompt, SamplingParams(max_tokens=60)) for prompt in prompts(2, seed=17)]
    while len(served.scheduler.drafted) < 2:
        served.step()
    served.step()
    for request in requests:
        needed = request.num_tokens + 2 * K
        assert needed + 32 < 8 * request.num_pages <= 8 * -(-(len(request.prompt) + 60 + 2 * K + 1) // 8)
    scarce = speculating(pairs["eagle"], num_pages=30)
    request = scarce.add(prompts(1, longest=8)[0], SamplingParams(max_tokens=60))
    while request not in scarce.scheduler.drafted:
        scarce.step()
    for _ in range(8):
        scarce.step()
        assert 2 * (29 - request.num_pages) > 29 - 9


def test_pages_for_rounds_to_come_are_given_back_to_who_needs_them(pairs: dict[str, Any]) -> None:
    short = prompts(2, longest=6, seed=18)
    asked = [*short, [5, 9] * 40]
    params = [SamplingParams(max_tokens=60), SamplingParams(max_tokens=60), SamplingParams(max_tokens=8)]
    served = speculating(pairs["eagle"], num_pages=26, max_num_tokens=96)
    running = [served.add(prompt, one) for prompt, one in zip(short, params, strict=False)]
    while len(served.scheduler.drafted) < 2:
        served.step()
    served.step()
    free, needed = served.scheduler.pages.num_free, 11  # for a prompt of 80 tokens, and what is drafted
    assert free < needed <= 25 - sum(-(-(request.num_computed + 2 * K) // 8) for request in running)
    late = served.add(asked[2], params[2])
    served.step()
    assert late.slot is not None
    list(served.stream())
    requests = [*running, late]
    assert [request.output for request in requests] == plain(pairs["eagle"][0], asked, params, max_num_tokens=96)
    assert all(request.preemptions == 0 for request in requests)
    assert served.scheduler.pages.num_free == 25


# Sampling.


def test_sampled_tokens_are_the_same_in_every_mode(pairs: dict[str, Any]) -> None:
    asked = prompts(6, seed=9)
    params = [SamplingParams(max_tokens=20, temperature=2.0 * (index % 3)) for index in range(6)]
    found, counted = [], []
    for mode in MODES:
        torch.manual_seed(3)  # of the first token of each, which the prompt's step draws
        served = speculating(pairs["eagle"], mode=mode, acceptance="rejection", seed=11)
        found.append(served.generate(asked, params))
        counted.append(served.acceptance)
    assert found == [found[0]] * len(MODES)
    assert counted == [counted[0]] * len(MODES)
    greedy = plain(pairs["eagle"][0], asked, SamplingParams(max_tokens=20))
    assert [one == other for one, other in zip(found[0], greedy, strict=True)] == [True, False, False] * 2
    assert counted[0].accepted > 0


def test_sampled_tokens_are_distributed_as_the_targets(pairs: dict[str, Any]) -> None:
    """The third token of many requests with one prompt, against the target's own distribution of it."""
    target, prompt, temperature = pairs["eagle"][0], prompts(1, seed=10, longest=9)[0], 1.4
    settings = {"max_num_seqs": 256, "max_num_tokens": 2560, "num_pages": 1200, "max_model_len": 16}
    served = speculating(pairs["eagle"], mode="NONE", acceptance="rejection", **settings)
    count = 3000
    found = served.generate([prompt] * count, SamplingParams(max_tokens=3, temperature=temperature))
    # What the target says after each pair of first tokens, from its logits over all of them at once.
    heads = sorted({tuple(tokens[:2]) for tokens in found})
    rows = _logits(target, [[*prompt, *head] for head in heads])
    probabilities = dict(zip(heads, (rows.double() / temperature).softmax(-1), strict=True))
    expected = sum(probabilities[tuple(tokens[:2])] for tokens in found)
    counts = torch.bincount(torch.tensor([tokens[2] for tokens in found]), minlength=256).double()
    common = expected > 20  # the others together
    binned = [torch.cat((part[common], part[~common].sum()[None])) for part in (counts, expected)]
    statistic = float(((binned[0] - binned[1]) ** 2 / binned[1]).sum())
    freedom = int(common.sum())
    assert freedom >= 8
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 6  # about once in a thousand seeds
    assert served.acceptance.accepted > 500


def _logits(target: Any, sequences: list[list[int]]) -> torch.Tensor:
    """The target's logits after each of some sequences of one length, without a cache."""
    from bench.spec_decode.train_eagle import run_target

    device = target.model.embed_tokens.weight.device
    found = []
    with torch.inference_mode():
        for start in range(0, len(sequences), 64):
            ids = torch.tensor(sequences[start : start + 64], device=device)
            found.append(target.head(run_target(target, ids, ())[0][:, -1]).cpu())
    return torch.cat(found)


# Bad input.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0; expected at least 1; without drafts use Engine"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True; expected at least 1"),
        ({"num_draft_tokens": (2, 5, 2)}, r"num_draft_tokens is \(2, 5, 2\); expected each once"),
        ({"num_draft_tokens": ()}, "num_draft_tokens is .*expected at least 1"),
        ({"num_draft_tokens": 96, "max_num_tokens": 4096}, "num_draft_tokens is 96; expected below max_model_len=96"),
        ({"num_draft_tokens": 8}, r"max_num_tokens is 48; expected at least max_num_seqs \* .* = 54"),
        ({"acceptance": "maybe"}, "acceptance is 'maybe'"),
        ({"mean_length": 7.0}, "mean_length is 7.0; expected from 1 to 6"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        SpecConfig(**SETTINGS | changes)


@pytest.mark.parametrize(
    ("acceptance", "params", "words"),
    [
        ("greedy", {"temperature": 1.0}, "temperature is 1.0; this engine accepts greedily"),
        ("rejection", {"temperature": 1.0, "top_k": 3}, "top_k, top_p and seed"),
        ("rejection", {"temperature": 1.0, "seed": 3}, "top_k, top_p and seed"),
        ("greedy", {"max_tokens": 100}, "together they may be 97 at most"),
    ],
)
def test_a_request_that_rounds_cannot_serve_is_refused(
    pairs: dict[str, Any], acceptance: str, params: dict[str, Any], words: str
) -> None:
    served = SpecEngine(*pairs["eagle"], SpecConfig(**SETTINGS, acceptance=acceptance))
    with pytest.raises(RequestError, match=words):
        served.add([1, 2], SamplingParams(**params))
    assert served.idle


def test_a_request_whose_drafts_would_not_fit_the_cache_is_refused(pairs: dict[str, Any]) -> None:
    served = SpecEngine(*pairs["eagle"], SpecConfig(**SETTINGS | {"num_pages": 6}))
    with pytest.raises(RequestError, match="may need 6 pages of 8 tokens, the cache has 5"):
        served.add([1] * 25, SamplingParams(max_tokens=10))


def test_a_mean_length_that_is_asked_for_is_what_rounds_give(pairs: dict[str, Any]) -> None:
    served = speculating(pairs["blind"], mean_length=2.4)
    served.generate(prompts(6, seed=12), SamplingParams(max_tokens=50))
    assert served.acceptance.mean_length == pytest.approx(2.4, abs=0.2)
    assert served.acceptance.rates[0] == 1
    assert served.acceptance.per_position[2:] == [0] * (K - 2)
