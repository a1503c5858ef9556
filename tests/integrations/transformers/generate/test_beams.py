"""Beam search decodes by replays, which put the cache in the beams' new order, and gives plain sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
import tiny_states  # noqa: E402
from tiny_generation import CACHE, MODELS, TOKENS, graphed, inputs  # noqa: E402

from simplegraph.integrations.transformers.generate.cache.layers import state_tensors  # noqa: E402

BEAMS = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "num_beams": 3}
SERVED = MODELS | {name: tiny_states.MODELS[name] for name in ("Mamba", "Lfm2", "Zamba2") if name in tiny_states.MODELS}


def pair(name: str, device: torch.device) -> tuple[Any, Any]:
    plain, model = (tiny.build(SERVED[name], device) for _ in range(2))
    return plain, model


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "t5", "whisper", "Mamba", "Lfm2", "Zamba2"])
def test_ragged_batches_give_plain_sequences(name: str, device: torch.device) -> None:
    plain, model = pair(name, device)
    settings = BEAMS | {"return_dict_in_generate": True, "output_scores": True}
    with graphed(model, max_batch_size=8) as graphs:
        steps, orders = 0, set()
        for seed, lengths in enumerate(([7, 4], [5], [3, 7], [1])):
            batch = inputs(name, lengths, device, seed)
            found, expected = (one.generate(**batch, **settings) for one in (model, plain))
            assert torch.equal(found.sequences, expected.sequences)
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, rtol=1e-3, atol=1e-3)
            steps += TOKENS - 1
            orders.update(found.beam_indices.flatten().tolist())
        assert not graphs.stats.failures
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP}
        assert graphs.stats.replays == steps - sum(graphs.stats.eager.values())
        assert len(orders) > 1, "beams never changed places"


def test_sampled_beams_and_several_sequences_for_each_prompt(device: torch.device) -> None:
    plain, model = pair("llama", device)
    batch = tiny.prompts([6, 4], device)
    with graphed(model, max_batch_size=8) as graphs:
        for settings in ({"do_sample": True, "top_k": 20}, {"num_return_sequences": 3}, {"early_stopping": True}):
            found = []
            for one in (plain, model):
                torch.manual_seed(3)
                found.append(one.generate(**batch, **(BEAMS | settings)))
            assert torch.equal(*found)
        assert graphs.stats.replays == 3 * (TOKENS - 1) - 1  # six rows once


@pytest.mark.proofs
def test_a_proof_reorders_no_cache_twice(device: torch.device) -> None:
    plain, model = pair("Lfm2", device)
    with graphed(model, max_batch_size=8) as graphs:
        for seed, lengths in enumerate(([7, 4], [5], [3, 7])):
            batch = tiny.prompts(lengths, device, seed)
            assert torch.equal(model.generate(**batch, **BEAMS), plain.generate(**batch, **BEAMS))
        assert graphs.stats.eager[Reason.PROOF]
        assert graphs.stats.replays > TOKENS


def test_beams_that_outgrow_the_cache_go_on_without_it_in_their_order(device: torch.device) -> None:
    plain, model = pair("llama", device)
    batch = tiny.prompts([58, 30], device)
    with graphed(model, max_batch_size=8) as graphs:
        assert torch.equal(model.generate(**batch, **BEAMS), plain.generate(**batch, **BEAMS))
        assert graphs.stats.eager[Reason.LENGTH_TOO_LARGE] == 1
        assert graphs.stats.replays == 64 - 58 - 1


@pytest.mark.parametrize("name", ["llama", "t5", "Zamba2"])
def test_the_returned_cache_is_in_the_beams_order(name: str, device: torch.device) -> None:
    plain, model = pair(name, device)
    settings = BEAMS | {"return_dict_in_generate": True}
    with graphed(model, max_batch_size=8) as graphs:
        for _ in range(2):
            kept = [one.generate(**tiny.prompts([7, 4], device), **settings)[CACHE] for one in (plain, model)]
            for expected, found in zip(
                *(getattr(one, "self_attention_cache", one).layers for one in kept), strict=True
            ):
                for one, other in zip(tensors_of(expected), tensors_of(found), strict=True):
                    torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)
            assert "reorder_cache" not in vars(kept[1])
        assert graphs.stats.replays


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """The keys, values and states in a cache's layer."""
    keyed = [layer.keys, layer.values] if getattr(layer, "keys", None) is not None else []
    return keyed + list(state_tensors(layer).values())


def test_greedy_decoding_and_beams_take_turns(device: torch.device) -> None:
    plain, model = pair("t5", device)
    batch = tiny.prompts([6, 4], device)
    with graphed(model, max_batch_size=8) as graphs:
        for beams in (3, 1, 3, 1):
            settings = BEAMS | {"num_beams": beams}
            assert torch.equal(model.generate(**batch, **settings), plain.generate(**batch, **settings))
        assert not graphs.stats.failures
        assert graphs.stats.replays == 4 * (TOKENS - 1) - sum(graphs.stats.eager.values())
