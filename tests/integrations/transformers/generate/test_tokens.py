"""Steps from replays give the tokens and logits that plain `generate` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from tiny_generation import CACHE, GREEDY, MODELS, TOKENS, graphed, inputs  # noqa: E402

from simplegraph.integrations.transformers import graph_generation  # noqa: E402


@pytest.mark.parametrize("name", MODELS)
def test_ragged_batches_of_changing_sizes_give_plain_tokens_and_logits(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    with graphed(model) as graphs:
        steps = 0
        for seed, lengths in enumerate(([7, 4, 6], [5], [9, 9, 2, 3], [3, 7], [11])):
            batch = inputs(name, lengths, device, seed)
            expected, found = plain.generate(**batch, **settings), model.generate(**batch, **settings)
            assert type(found) is type(expected)
            assert torch.equal(found.sequences, expected.sequences)
            for actual, wanted in zip(found.logits, expected.logits, strict=True):
                torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)
            steps += TOKENS - 1
        eager = sum(graphs.stats.eager.values())
        assert not graphs.stats.failures
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP}
        assert graphs.stats.replays == steps - eager
        assert eager <= 2 * len(graphs.stats.graphs) + 1  # every size is warmed up once, and only then captured


def test_all_but_two_steps_of_the_first_generation_are_replays(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6], device)
    with graphed(llama) as graphs:
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == TOKENS - 2
        llama.generate(**batch, **GREEDY)
        assert graphs.stats.replays == 2 * TOKENS - 3
        assert graphs.stats.captures == 1


def test_sampling_draws_the_random_numbers_that_it_would(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6, 4, 5], device)
    settings = {"max_new_tokens": TOKENS, "do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 1}
    with graphed(llama) as graphs:
        for seed in range(3):
            found = []
            for model in (plain, llama):
                torch.manual_seed(seed)
                found.append(model.generate(**batch, **settings))
            assert torch.equal(*found)
        assert graphs.stats.replays > 2 * TOKENS


def test_several_sequences_for_each_prompt(llama: Any, plain: Any, device: torch.device) -> None:
    settings = {"max_new_tokens": TOKENS, "do_sample": True, "num_return_sequences": 2}
    batch = tiny.prompts([6, 4], device)
    found = []
    with graphed(llama) as graphs:
        for model in (plain, llama):
            torch.manual_seed(3)
            found.append(model.generate(**batch, **settings))
        assert torch.equal(*found)
        assert graphs.stats.replays


def test_rows_stop_at_their_end_token_and_are_padded(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7, 4, 6], device)
    free = plain.generate(**batch, **GREEDY)
    stop = [int(free[0, 7 + 2]), int(free[1, 7 + 5])]  # the first row ends after 3 tokens, the second after 6 or sooner
    settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": stop}
    expected = plain.generate(**batch, **settings)
    assert (expected == tiny.PAD).sum() > (batch["input_ids"] == tiny.PAD).sum()
    with graphed(llama) as graphs:
        assert torch.equal(llama.generate(**batch, **settings), expected)
        assert graphs.stats.replays


def test_a_streamer_is_given_every_token(llama: Any, device: torch.device) -> None:
    class Tokens(transformers.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    with graphed(llama) as graphs:
        streamer = Tokens()
        result = llama.generate(**tiny.prompts([6], device), **GREEDY, streamer=streamer)
        assert streamer.seen == result[0].tolist()
        assert streamer.ended
        assert graphs.stats.replays


def test_processors_and_criteria_see_every_step(llama: Any, plain: Any, device: torch.device) -> None:
    def run(model: Any) -> tuple[torch.Tensor, list[int]]:
        seen: list[int] = []

        def never_seven(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(ids.shape[1])
            return scores.index_fill(1, torch.tensor([42], device=scores.device), float("-inf"))

        def at_fifteen(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((ids.shape[0],), ids.shape[1] >= 15, device=ids.device)

        settings = {"max_new_tokens": 30, "logits_processor": [never_seven], "stopping_criteria": [at_fifteen]}
        return model.generate(**tiny.prompts([6, 3], device), do_sample=False, eos_token_id=None, **settings), seen

    with graphed(llama) as graphs:
        (found, steps), (expected, plain_steps) = run(llama), run(plain)
        assert torch.equal(found, expected)
        assert steps == plain_steps == list(range(6, 15))
        assert graphs.stats.replays


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_sequence_may_grow_past_a_captured_length(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    batch = tiny.prompts([250, 200], device)
    with graphed(model, max_length=400) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.captures == 2  # for 256 positions, and for 400
        assert graphs.stats.replays >= TOKENS - 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inside_of_other_modes_one_after_the_other(
    mode: Callable[[], Any], llama: Any, plain: Any, device: torch.device
) -> None:
    batch = tiny.prompts([5, 6], device)
    with graphed(llama) as graphs:
        llama.generate(**batch, **GREEDY)
        for _ in range(2):
            with mode():
                assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays > 2 * TOKENS


def test_under_autocast_and_after_it(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([5, 6], device)
    settings = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    with graphed(llama) as graphs:
        for _ in range(2):
            with torch.autocast(device.type, torch.bfloat16):
                found, expected = (model.generate(**batch, **settings) for model in (llama, plain))
            for actual, wanted in zip(found.logits[:4], expected.logits[:4], strict=True):
                torch.testing.assert_close(actual, wanted, rtol=5e-2, atol=5e-2)  # a few units of bfloat16
            assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        # The first step with either. Newer releases cache values in autocast's dtype: each change needs another cache.
        assert graphs.stats.replays == 4 * (TOKENS - 1) - (4 if CACHE == "cache" else 2)


def test_guidance_has_a_cache_of_its_own_and_runs_as_it_did(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6], device)
    settings = GREEDY | {"guidance_scale": 1.5}
    with graphed(llama) as graphs:
        assert torch.equal(llama.generate(**batch, **settings), plain.generate(**batch, **settings))
        assert graphs.stats.replays == TOKENS - 2
        assert graphs.stats.eager[Reason.GENERATION] == 1


def test_eager_attention_too_or_the_line_in_the_way(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["gemma2"], device) for _ in range(2))
    for one in (plain, model):
        one.set_attn_implementation("eager")
    batch = tiny.prompts([7, 4, 6], device)
    with graphed(model) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        # 5.17 makes a scalar on the host for every mask, which is a copy that no graph can hold.
        failed = "".join(graphs.stats.failures.values())
        assert graphs.stats.replays == (0 if "torch.tensor(0.0" in failed else TOKENS - 2)


def test_prompts_given_as_embeddings_and_positions_shared_by_all_rows(
    llama: Any, plain: Any, device: torch.device
) -> None:
    ids = tiny.prompts([6, 6], device)["input_ids"]
    with graphed(llama) as graphs:
        for prompt in (
            {"inputs_embeds": plain.get_input_embeddings()(ids).detach()},
            {"input_ids": ids, "position_ids": torch.arange(6, device=device)[None]},
        ):
            assert torch.equal(llama.generate(**prompt, **GREEDY), plain.generate(**prompt, **GREEDY))
        assert graphs.stats.replays == 2 * (TOKENS - 1) - 1


def test_a_prefill_in_chunks(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([9, 9], device)
    with graphed(llama) as graphs:
        for chunk in (4, 3):
            settings = GREEDY | {"prefill_chunk_size": chunk}
            assert torch.equal(llama.generate(**batch, **settings), plain.generate(**batch, **settings))
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP}
        assert graphs.stats.replays >= 2 * (TOKENS - 1) - 1


def test_sources_of_many_lengths_share_the_graphs_of_the_next_captured_one(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["t5"], device) for _ in range(2))
    with graphed(model, max_source_length=100) as graphs:
        for seed, lengths in enumerate(([7, 4], [20, 3], [1, 2], [33, 64], [9, 9], [70, 100])):
            batch = tiny.prompts(lengths, device, seed)
            if seed == 4:
                del batch["attention_mask"]
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.captures == 2  # 64 and 100
        assert Reason.LENGTH_TOO_LARGE not in graphs.stats.eager
        batch = tiny.prompts([101], device)
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.LENGTH_TOO_LARGE] == 1


def test_two_models_in_one_pool(device: torch.device) -> None:
    names, pool = ("llama", "gpt2"), sg.graph_pool(device)
    plain, models = ([tiny.build(MODELS[name], device) for name in names] for _ in range(2))
    handles = [graph_generation(model, max_batch_size=2, max_length=64, pool=pool) for model in models]
    for _ in range(3):
        for one, other in zip(plain, models, strict=True):
            batch = tiny.prompts([6, 4], device)
            assert torch.equal(other.generate(**batch, **GREEDY), one.generate(**batch, **GREEDY))
    assert all(handle.stats.replays == 3 * (TOKENS - 1) - 1 for handle in handles)
