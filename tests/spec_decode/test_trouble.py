"""Requests that come, go and give way, failing drafts, changing K: whatever happens, no token is a wrong one."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from bench.engine import Engine, EngineConfig, RequestError, SamplingParams  # noqa: E402
from bench.engine.request import FinishReason, Request  # noqa: E402
from bench.engine.spec import SpecEngine  # noqa: E402
from bench.engine.spec_config import SpecConfig  # noqa: E402
from bench.engine.spec_scheduler import RoundPlan  # noqa: E402
from bench.models.eagle import tiny_pair  # noqa: E402
from bench.tools import text  # noqa: E402
from simplegraph import CaptureSizeError  # noqa: E402

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_tokens": 24,
    "max_model_len": 48,
    "num_pages": 20,
    "page_size": 4,
    "attention": "sdpa",
}
DRAFTING: dict[str, Any] = {"num_draft_tokens": (3, 1, 2), "capture_sizes": (2, 4), "mixed_capture_sizes": (24,)}


@pytest.fixture(scope="module")
def pair() -> Any:
    return tiny_pair("eagle3", device="cuda" if torch.cuda.is_available() else "cpu")


def prompts(count: int, *, longest: int = 20, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    lengths = [draw.choice([1, draw.randint(1, longest)]) for _ in range(count)]
    return [text.token_ids(length, 256, start=draw.randrange(8000)).tolist() for length in lengths]


def plain(pair: Any, asked: list[list[int]], params: Any) -> list[list[int]]:
    return Engine(pair[0], EngineConfig(**SETTINGS | {"mode": "NONE", "num_pages": 200})).generate(asked, params)


def speculating(pair: Any, *, captured: bool = True, pool: Any = None, **changes: Any) -> SpecEngine:
    served = SpecEngine(*pair, SpecConfig(**{**SETTINGS, **DRAFTING} | changes), pool=pool)
    if captured:
        assert all(summary.failed == {} for summary in served.capture())
    return served


def use_badly(served: SpecEngine, pair: Any, seed: int) -> list[Request]:
    """Requests arrive, are cancelled, and have K change under them, at random; all that they were given is checked."""
    draw = random.Random(seed)
    asked = prompts(12, seed=seed)
    params = [SamplingParams(max_tokens=draw.choice([1, 2, draw.randint(1, 28)])) for _ in asked]
    expected = plain(pair, asked, params)
    waiting, requests, streamed = list(zip(asked, params, strict=True)), [], {}
    while waiting or not served.idle:
        if waiting and draw.random() < 0.8:
            request = served.add(*waiting.pop(0))
            requests.append(request)
            streamed[request] = []
        if requests and draw.random() < 0.06:
            served.cancel(draw.choice(requests))
        served.num_draft_tokens = draw.choice([3, 1, 2])
        for output in served.step():
            if output.token is not None:
                streamed[output.request].append(output.token)
    for request, tokens in zip(requests, expected, strict=True):
        assert request.output == streamed[request]
        whole = request.finished is not FinishReason.CANCELLED
        assert request.output == (tokens if whole else tokens[: len(request.output)])
    assert served.scheduler.pages.num_free == served.config.num_pages - 1
    assert not served.scheduler.drafted
    return requests


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "NONE"},
        {"mode": "PIECEWISE"},
        {"mode": "FULL_AND_PIECEWISE"},
        {"mode": "FULL_AND_PIECEWISE", "captured": False},
        {"mode": "NONE", "acceptance": "rejection"},  # at a temperature of 0
    ],
    ids=["eager", "piecewise", "full", "never captured", "rejection"],
)
def test_arrivals_cancellations_preemptions_and_changing_k_change_no_token(pair: Any, settings: dict[str, Any]) -> None:
    served = speculating(pair, **settings)
    requests = [request for seed in range(4) for request in use_badly(served, pair, seed)]
    assert sum(request.preemptions for request in requests) > 0
    assert {request.finished for request in requests} == {FinishReason.LENGTH, FinishReason.CANCELLED}
    assert served.acceptance.accepted > 50


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_a_draft_that_raises_at_any_of_its_steps_costs_a_step_and_no_token(
    pair: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, params = prompts(3, seed=9), SamplingParams(max_tokens=20)
    served = speculating(pair, mode=mode, draft_mode="NONE")
    requests = [served.add(prompt, params) for prompt in asked]
    choose, draw, failures = pair[1].choose, random.Random(2), 0

    def sometimes(hidden: torch.Tensor) -> torch.Tensor:
        if draw.random() < 0.15:
            raise MemoryError("no memory")
        return choose(hidden)

    monkeypatch.setattr(pair[1], "choose", sometimes)
    while not served.idle:
        try:
            served.step()
        except MemoryError:
            failures += 1
    assert failures > 3
    assert [request.output for request in requests] == plain(pair, asked, params)
    assert served.scheduler.pages.num_free == served.config.num_pages - 1


def test_two_engines_of_one_process_may_share_a_pool_and_take_turns(pair: Any) -> None:
    asked, params = prompts(6, seed=4), SamplingParams(max_tokens=18)
    first = speculating(pair, num_draft_tokens=3)
    second = speculating(pair, num_draft_tokens=2, pool=first.runner.managers[3].pool)
    engines = [first, second]
    requests = [engines[index % 2].add(prompt, params) for index, prompt in enumerate(asked)]
    while not all(engine.idle for engine in engines):
        for engine in engines:
            engine.step()
    assert [request.output for request in requests] == plain(pair, asked, params)
    pools = {id(manager.pool) for engine in engines for manager in engine.runner.managers.values()}
    assert len(pools) == 1
    first.runner.reset()  # the other one goes on
    again = second.generate(asked, params)
    assert again == plain(pair, asked, params)
    assert all(manager.stats.replays > 0 for manager in second.runner.managers.values())


def test_nothing_to_do_is_no_step(pair: Any) -> None:
    served = speculating(pair, captured=False)
    assert served.idle
    assert served.step() == []
    assert served.generate([]) == []
    with pytest.raises(CaptureSizeError, match="a batch needs at least one token"):
        served.runner.drafters[3].dispatch(0, 0, None)
    request = served.add([5], SamplingParams(max_tokens=4))
    served.cancel(request)
    outputs = served.step()
    assert [(output.token, output.finished) for output in outputs] == [(None, FinishReason.CANCELLED)]
    assert served.idle


def test_stop_tokens_may_come_as_any_sequence(pair: Any) -> None:
    prompt = prompts(1, seed=6)[0]
    expected = plain(pair, [prompt], SamplingParams(max_tokens=24))[0]
    stops = (expected[7], expected[11])
    found = next(index for index, token in enumerate(expected) if token in stops)
    served = speculating(pair, captured=False, mode="NONE")
    for given in (list(stops), np.array(stops), set(stops)):
        params = SamplingParams(max_tokens=24, stop_token_ids=given)  # type: ignore[arg-type]
        assert served.generate([prompt], params) == [expected[: found + 1]]


@pytest.mark.parametrize(
    "stops",
    [None, 5, (token for token in [3]), ["3"], "3", [0.5]],
    ids=["None", "number", "generator", "words", "text", "fraction"],
)
def test_stop_tokens_that_are_none_are_refused_before_they_cost_others_their_tokens(stops: Any) -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids is .*expected token ids"):
        SamplingParams(stop_token_ids=stops)


def test_sampling_settings_at_their_ends(pair: Any) -> None:
    served = speculating(pair, captured=False, mode="NONE", acceptance="rejection")
    prompt = prompts(1, seed=8)[0]
    greedy = plain(pair, [prompt], SamplingParams(max_tokens=12))
    assert served.generate([prompt], SamplingParams(max_tokens=12, temperature=1e-9)) == greedy
    assert served.generate([prompt], SamplingParams(max_tokens=12, top_p=1.0)) == greedy
    hot = served.generate([prompt], SamplingParams(max_tokens=12, temperature=1e9))
    assert hot != greedy
    assert all(0 <= token < 256 for token in hot[0])
    with pytest.raises(RequestError, match="top_p is 0"):
        SamplingParams(temperature=1.0, top_p=0)


def test_a_second_engine_with_longer_requests_leaves_the_firsts_graphs_what_they_read() -> None:
    own = tiny_pair("eagle3", device="cuda" if torch.cuda.is_available() else "cpu")
    first = speculating(own, captured=False)
    read = weakref.ref(own[1]._table)
    second = speculating(own, captured=False, max_model_len=96)
    gc.collect()
    assert second.config.max_model_len > first.config.max_model_len
    assert own[1]._table is not read()
    assert read() is not None


def test_temperatures_may_be_whole_numbers(pair: Any) -> None:
    served = speculating(pair, captured=False, mode="NONE", acceptance="rejection")
    prompt = prompts(1, seed=8)[0]
    greedy = plain(pair, [prompt], SamplingParams(max_tokens=12))
    assert served.generate([prompt], SamplingParams(max_tokens=12, temperature=0)) == greedy


# What the device knows of a round, whether the host sent it or not.


class _Interrupt(BaseException):
    """Like a KeyboardInterrupt: no code handles it."""


def check_on_device(served: SpecEngine, plan: RoundPlan) -> None:
    """The round that just ran had the lengths, slots, tokens and pages that its requests have on the host."""
    runner, size = served.runner, served.config.page_size
    query_len, reqs, batch = plan.num_draft_tokens + 1, len(plan.requests), runner.metadata.batch
    starts = np.array([request.num_tokens - 1 for request in plan.requests])
    positions = starts[:, None] + np.arange(query_len)
    table = served.scheduler.pages.table[[request.slot for request in plan.requests]]
    slots = np.take_along_axis(table, positions // size, axis=1) * size + positions % size
    view, rows = runner.metadata.view(batch.padded_tokens, batch.padded_reqs), reqs * query_len
    assert view.seq_lens.tolist() == (starts + query_len).tolist() + [0] * (batch.padded_reqs - reqs)
    assert batch.seq_lens.tolist() == (starts + query_len).tolist()
    assert view.slot_mapping.tolist() == slots.ravel().tolist() + [-1] * (batch.padded_tokens - rows)
    inputs = runner._inputs
    assert inputs.positions[:rows].tolist() == positions.ravel().tolist()
    assert inputs.ids[:rows:query_len].tolist() == [request.output[-1] for request in plan.requests]
    assert inputs.slots[:reqs].tolist() == [request.slot for request in plan.requests]
    for row, length in enumerate(starts + query_len + plan.num_draft_tokens - 1):
        width = -(-length // size)
        assert view.block_table[row, :width].tolist() == table[row, :width].tolist()


def interfere(served: SpecEngine, draw: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Capture, launch rounds whose results are unused, or make a part of the next step fail before or after it ran."""
    runner, count = served.runner, served.num_draft_tokens
    if draw.random() < 0.05:
        served.capture()
    if draw.random() < 0.05 and (plan := served.scheduler.schedule_round(count)) is not None:
        for _ in range(draw.randint(1, 2)):
            runner.launch_round(plan).wait()
    if draw.random() < 0.1:
        places: list[tuple[Any, str]] = [
            (runner.managers[count], "run"),
            (runner.drafters[count], "draft"),
            (runner, "wait"),
            (runner.metadata, "set"),
            (runner.metadata, "advance"),
            (runner._inputs, "load_round"),
            (runner._results, "send"),
        ]
        thing, name = draw.choice(places)
        work, after = getattr(thing, name), draw.random() < 0.5

        def fail(*args: Any, **settings: Any) -> None:
            if after:
                work(*args, **settings)
            raise _Interrupt

        patch.setattr(thing, name, fail)


@pytest.mark.parametrize("num_pages", [20, 80])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_whatever_interferes_the_device_knows_what_the_host_would_have_sent(
    pair: Any, mode: str, num_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = speculating(pair, mode=mode, num_pages=num_pages)
    launch, advance, moved, interrupted = served.runner.launch_round, served.runner.metadata.advance, 0, 0

    def checked(plan: RoundPlan) -> Any:
        arriving = launch(plan)
        check_on_device(served, plan)
        return arriving

    def counted(*args: Any, **settings: Any) -> None:
        nonlocal moved
        moved += 1
        advance(*args, **settings)

    monkeypatch.setattr(served.runner, "launch_round", checked)
    monkeypatch.setattr(served.runner.metadata, "advance", counted)
    for seed in range(8):
        draw = random.Random(seed)
        asked = prompts(8, seed=seed)
        params = [SamplingParams(max_tokens=draw.randint(1, 28)) for _ in asked]
        waiting, requests = list(zip(asked, params, strict=True)), []
        often, changing = draw.choice([0.8, 0.2]), draw.choice([0, 0.2])
        while waiting or not served.idle:
            if waiting and draw.random() < often:
                requests.append(served.add(*waiting.pop(0)))
            if requests and draw.random() < 0.03:
                served.cancel(draw.choice(requests))
            if draw.random() < changing:
                served.num_draft_tokens = draw.choice([3, 1, 2])
            with monkeypatch.context() as patch:
                interfere(served, draw, patch)
                try:
                    served.step()
                except _Interrupt:
                    interrupted += 1
        for request, tokens in zip(requests, plain(pair, asked, params), strict=True):
            whole = request.finished is not FinishReason.CANCELLED
            assert request.output == (tokens if whole else tokens[: len(request.output)])
    assert moved > 40
    assert interrupted > 10
