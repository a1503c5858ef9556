"""`generate` through graphs does not wait for each token if that cannot be observed; its results are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from transformers.generation import utils as generation_utils  # noqa: E402

from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.generate import ahead  # noqa: E402

TOKENS = 12
GREEDY = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.skipif(
    not hasattr(generation_utils, "DeferredStopCheck"), reason="this release of transformers cannot undo a step"
)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record the results of every late check."""
    said: list[bool] = []
    check = ahead.LateCheck.__call__

    def told(self: Any, *args: Any) -> bool:
        said.append(check(self, *args))
        return said[-1]

    monkeypatch.setattr(ahead.LateCheck, "__call__", told)
    return said


@pytest.fixture
def pair(device: torch.device) -> Iterator[tuple[Any, Any, Any]]:
    """The same model plain, and with graphs; the graphs."""
    plain, model = (tiny.build(tiny.DECODERS["llama"], device) for _ in range(2))
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        yield plain, model, graphs


def ends(plain: Any, batch: dict[str, Any]) -> list[int]:
    """Tokens that end the rows of a batch after some steps, not all at once."""
    free = plain.generate(**batch, **GREEDY)[:, batch["input_ids"].shape[1] :]
    return [int(row[6 - index]) for index, row in enumerate(free)]


def test_a_generation_of_fixed_length_never_runs_a_step_too_many(pair: Any, device: torch.device, checks: Any) -> None:
    plain, model, graphs = pair
    for settings in ({}, {"do_sample": True, "top_k": 20}):
        batch, results, states = tiny.prompts([6, 4], device), [], []
        for one in (plain, model):
            torch.manual_seed(3)
            results.append(one.generate(**batch, **(GREEDY | settings)))
            states.append(torch.rand(2, device=device))
        assert torch.equal(*results)
        assert torch.equal(*states)
    assert checks == 2 * [*[False] * (TOKENS - 1), True]
    assert sum(graphs.stats.eager.values()) + graphs.stats.replays == 2 * (TOKENS - 1)


@pytest.mark.parametrize("lengths", [[7, 4, 6], [5]])
def test_sequences_that_end_early_end_where_they_did(
    lengths: list[int], pair: Any, device: torch.device, checks: Any
) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts(lengths, device)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends(plain, batch)}
    for _ in range(2):
        found, expected = (one.generate(**batch, **settings) for one in (model, plain))
        assert torch.equal(found, expected)
    new = expected.shape[1] - batch["input_ids"].shape[1]
    assert new < 40
    assert checks == 2 * [*[False] * new, True]  # it is told one step late
    assert graphs.stats.replays


def test_an_end_at_the_very_last_step(pair: Any, device: torch.device, checks: Any) -> None:
    plain, model, _ = pair
    batch = tiny.prompts([5], device)
    free = plain.generate(**batch, **GREEDY)[0, 5:].tolist()
    for position in (0, 1, TOKENS - 2, TOKENS - 1):
        settings = GREEDY | {"eos_token_id": free[position]}
        assert torch.equal(model.generate(**batch, **settings), plain.generate(**batch, **settings))
    assert checks.count(True) == 4


def test_scores_are_those_of_the_tokens(pair: Any, device: torch.device, checks: Any) -> None:
    plain, model, _ = pair
    batch = tiny.prompts([7, 4], device)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends(plain, batch)}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    found, expected = (one.generate(**batch, **settings) for one in (model, plain))
    assert len(found.logits) == len(expected.logits) == found.sequences.shape[1] - 7
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    assert not checks  # the cache is handed out, so there is no step too many


@pytest.mark.parametrize("who", ["sampling", "processor", "criterion", "streamer", "hook", "cache"])
def test_whoever_could_tell_is_asked_in_time(who: str, pair: Any, device: torch.device, checks: Any) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([7, 4, 6], device)
    settings: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": ends(plain, batch)}
    calls: dict[int, list[int]] = {id(plain): [], id(model): []}
    results = []
    for one in (plain, model):
        seen = calls[id(one)]

        def see(ids: torch.Tensor, scores: Any, seen: list[int] = seen, **kwargs: Any) -> Any:
            seen.append(ids.shape[1])
            return scores if who == "processor" else torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

        class Streamer(transformers.generation.streamers.BaseStreamer):
            def put(self, value: Any, seen: list[int] = seen) -> None:
                seen.append(value.numel())

            def end(self) -> None:
                pass

        extra: dict[str, Any] = {}
        if who == "sampling":
            extra = {"do_sample": True, "top_k": 1}
        elif who == "processor":
            extra = {"logits_processor": [see]}
        elif who == "criterion":
            extra = {"stopping_criteria": [see]}
        elif who == "streamer":
            extra = {"streamer": Streamer()}
        elif who == "hook":
            one.register_forward_hook(lambda *args, seen=seen: seen.append(1))
        elif who == "cache":
            extra = {tiny.CACHE: transformers.DynamicCache(config=one.config)}
        torch.manual_seed(0)
        results.append(one.generate(**batch, **(settings | extra)))
        if who == "sampling":
            seen.append(int(torch.randint(1 << 30, ())))
        elif who == "cache":
            seen.append(extra[tiny.CACHE].get_seq_length())
    assert torch.equal(*results)
    assert results[0].shape[1] < 47
    assert calls[id(plain)] == calls[id(model)] != []
    assert not checks
    assert graphs.stats.replays


def test_a_constraint_of_the_users_own_is_not_asked_what_comes_after_the_end(
    pair: Any, device: torch.device, checks: Any
) -> None:
    """It may well have no answer: a trie of permitted answers ends where they end."""
    plain, model, graphs = pair
    batch = tiny.prompts([5], device)
    permitted = [7, 8, 9, 10, tiny.EOS]
    asked: list[int] = []

    def permit(row: int, ids: torch.Tensor) -> list[int]:
        asked.append(len(ids) - 5)
        return permitted[len(ids) - 5 :][:1]

    for one in (plain, model, model):
        found = one.generate(**batch, max_new_tokens=12, do_sample=False, prefix_allowed_tokens_fn=permit)
        assert found[0, 5:].tolist() == permitted
    assert asked == 3 * [0, 1, 2, 3, 4]
    assert not checks
    assert graphs.stats.replays


def test_an_end_at_the_models_last_position_needs_none_after_it(device: torch.device, checks: Any) -> None:
    """An index beyond learned positions is an error that no GPU process recovers from."""
    config = transformers.GPT2Config(**tiny.GPT2 | {"n_positions": 16})
    plain, model = (tiny.build(lambda: transformers.GPT2LMHeadModel(config), device) for _ in range(2))
    for batch in (tiny.prompts([5], device, seed) for seed in range(20)):
        *free, last = plain.generate(**batch, **GREEDY)[0, 5:].tolist()
        if last not in free:
            break
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": last}
    with graph_generation(model, max_batch_size=2, max_length=64) as graphs:
        for _ in range(2):
            found = model.generate(**batch, **settings)
            assert found[0, 5:].tolist() == [*free, last]
        assert graphs.stats.replays
    assert not checks


def test_two_limits_of_length_end_a_generation_at_the_shorter_one_in_time(
    pair: Any, device: torch.device, checks: Any
) -> None:
    batch, states = tiny.prompts([5], device), []
    for one in pair[:2]:
        torch.manual_seed(3)
        limits = transformers.StoppingCriteriaList(map(transformers.MaxLengthCriteria, (12, 9)))
        found = one.generate(**batch, max_new_tokens=7, do_sample=True, eos_token_id=None, stopping_criteria=limits)
        assert found.shape == (1, 9)
        states.append(torch.rand(2, device=device))
    assert torch.equal(*states)
    assert not checks


def test_other_generations_keep_the_check_that_transformers_chose(pair: Any, device: torch.device, checks: Any) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([5], device)
    model.generate(**batch, **GREEDY)
    known = len(checks)
    plain.generate(**batch, **GREEDY)
    model.generate(**batch, **GREEDY, num_beams=2)
    model.generate(**batch, **GREEDY, use_cache=False)
    graphs.remove()
    model.generate(**batch, **GREEDY)
    assert len(checks) == known == TOKENS
    assert generation_utils.DeferredStopCheck is not ahead.LateCheck


def test_a_model_that_samples_in_its_own_way_is_asked_to(device: torch.device, checks: Any) -> None:
    sampled = []

    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            sampled.append(1)
            return super()._sample(*args, **kwargs)

    plain, model = (tiny.build(lambda: Own(transformers.LlamaConfig(**tiny.LLAMA)), device) for _ in range(2))
    batch = tiny.prompts([5], device)
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == TOKENS - 2
    assert sampled == [1, 1]
    assert not checks
