"""Models whose caches hold states, Mamba and its kin, decode by replays and give the tokens of plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
import tiny_states  # noqa: E402
from tiny_generation import GREEDY, TOKENS, graphed  # noqa: E402

from simplegraph.integrations.transformers.generate.cache.layouts import state_tensors  # noqa: E402


def pair(name: str, device: torch.device) -> tuple[Any, Any]:
    plain, model = (tiny.build(tiny_states.MODELS[name], device) for _ in range(2))
    return plain, model


@pytest.mark.parametrize("name", tiny_states.MODELS)
def test_ragged_batches_and_prompts_of_one_token_give_plain_tokens(name: str, device: torch.device) -> None:
    plain, model = pair(name, device)
    with graphed(model) as graphs:
        steps = 0
        # Left-padded rows, prompts of one token, batches that are padded to four rows, and one that comes again.
        for seed, lengths in enumerate(([7, 4, 6], [1], [1, 5], [1, 1], [7, 4, 6, 1], [9])):
            batch = tiny.prompts(lengths, device, seed)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            steps += TOKENS - 1
        assert not graphs.stats.failures
        assert set(graphs.stats.eager) <= {Reason.FIRST_CALL, Reason.WARMUP}
        assert graphs.stats.replays == steps - sum(graphs.stats.eager.values()) > steps // 2


@pytest.mark.proofs
@pytest.mark.parametrize("name", ["Mamba2", "Zamba2"])
def test_a_proof_advances_no_state_twice(name: str, device: torch.device) -> None:
    plain, model = pair(name, device)
    with graphed(model) as graphs:
        for seed, lengths in enumerate(([7, 4, 6], [5, 3, 2], [5, 3, 2, 9])):
            batch = tiny.prompts(lengths, device, seed)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.PROOF]
        assert graphs.stats.replays > TOKENS


@pytest.mark.parametrize("name", ["Mamba", "Zamba2", "Lfm2"])
def test_the_returned_cache_holds_the_states_of_plain_generate(name: str, device: torch.device) -> None:
    plain, model = pair(name, device)
    batch = tiny.prompts([7, 4, 6], device)
    with graphed(model) as graphs:
        for _ in range(2):
            results = [one.generate(**batch, **GREEDY, return_dict_in_generate=True) for one in (plain, model)]
            kept = [result.get("past_key_values", result.get("cache_params")) for result in results]
            model.generate(**tiny.prompts([9, 9], device, 5), **GREEDY)  # writes to the memory of the graphs
            for expected, found in zip(kept[0].layers, kept[1].layers, strict=True):
                assert type(found) is type(expected)
                states = [state_tensors(layer) for layer in (expected, found)]
                assert states[0].keys() == states[1].keys()
                for part, state in states[0].items():
                    torch.testing.assert_close(states[1][part], state, rtol=1e-3, atol=1e-3)
        assert graphs.stats.replays


def test_states_do_not_grow_so_that_no_sequence_is_too_long(device: torch.device) -> None:
    plain, model = pair("Mamba", device)
    batch = tiny.prompts([20, 9], device)
    with graphed(model, max_length=8) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == TOKENS - 2


def test_a_conversation_goes_on_with_the_states_of_its_last_turn(device: torch.device) -> None:
    def talk(model: Any) -> list[torch.Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        turns = [tiny.prompts([6], device)["input_ids"]]
        for seed in range(3):
            said = torch.cat([turns[-1], tiny.prompts([3], device, seed)["input_ids"]], dim=1)
            turns.append(model.generate(said, **GREEDY, **{tiny.CACHE: cache}))
        return turns

    plain, model = pair("Lfm2", device)
    with graphed(model) as graphs:
        assert all(map(torch.equal, talk(model), talk(plain)))
        assert graphs.stats.replays == 3 * (TOKENS - 1) - 1


def test_states_that_a_step_replaces_are_told_from_those_that_it_writes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = transformers.cache_utils.LinearAttentionLayer

    def replace(self: Any, states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self.recurrent_states[state_idx] = update(self, states, state_idx, **kwargs).clone()
        return self.recurrent_states[state_idx]

    update = layer.update_recurrent_state
    monkeypatch.setattr(layer, "update_recurrent_state", replace)
    plain, model = pair("Qwen3Next", device)
    batch = tiny.prompts([7, 4], device)
    with graphed(model) as graphs:
        for count in (1, 2):
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            assert graphs.stats.eager[Reason.GENERATION] == count
        assert "a step replaces recurrent_states of a LinearAttentionLayer" in graphs.stats.details[Reason.GENERATION]
        assert graphs.stats.replays == 0


@pytest.mark.proofs
@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_logits_in_float32_of_a_model_in_half_precision_keep_their_graphs(name: str, device: torch.device) -> None:
    plain, model = (each.to(torch.bfloat16) for each in pair(name, device))
    with graphed(model) as graphs:
        for seed in range(3):
            batch = tiny.prompts([7, 4, 6], device, seed)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays > 2 * TOKENS
        assert not graphs.stats.failures
