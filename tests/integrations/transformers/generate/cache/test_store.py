"""Caches hold what plain `generate` leaves in them, and their memory what the step at hand needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simplegraph as sg

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from tiny_generation import CACHE, GREEDY, MODELS, TOKENS, graphed, inputs  # noqa: E402

from simplegraph.base.reasons import CannotBind  # noqa: E402
from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.generate.cache.layers import CacheLayout  # noqa: E402


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "t5", "whisper"])
def test_the_returned_cache_holds_what_plain_generate_leaves(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    batch = inputs(name, [7, 4, 6], device)
    with graphed(model):
        for _ in range(2):
            caches = [m.generate(**batch, **GREEDY, return_dict_in_generate=True)[CACHE] for m in (plain, model)]
            assert type(caches[0]) is type(caches[1])
            assert caches[0].get_seq_length() == caches[1].get_seq_length()
            expected, found = (getattr(cache, "self_attention_cache", cache).layers for cache in caches)
            for one, other in zip(expected, found, strict=True):
                assert one.get_seq_length() == other.get_seq_length()
                torch.testing.assert_close(other.keys, one.keys, rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(other.values, one.values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_cache_that_a_hook_kept_holds_what_plain_generate_leaves(name: str, device: torch.device) -> None:
    batch, kept = tiny.prompts([7, 4], device), []
    for model in (tiny.build(tiny.DECODERS[name], device) for _ in range(2)):
        seen: list[Any] = []
        model.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1][CACHE]))
        if kept:
            graph_generation(model, max_batch_size=4, max_length=64)
            model.generate(**batch, **GREEDY)
            seen.clear()
        model.generate(**batch, **GREEDY)
        kept.append(seen[-1])
    expected, found = kept
    assert found.get_seq_length() == expected.get_seq_length()
    for layer, other in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_conversation_goes_on_with_the_cache_of_its_last_turn(name: str, device: torch.device) -> None:
    def talk(model: Any) -> list[torch.Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        said = tiny.prompts([6], device)["input_ids"]
        turns = []
        for seed in range(3):
            said = model.generate(said, **GREEDY, **{CACHE: cache})
            turns.append(said)
            said = torch.cat([said, tiny.prompts([3], device, seed)["input_ids"]], dim=1)
        return turns

    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    with graphed(model) as graphs:
        for found, expected in zip(talk(model), talk(plain), strict=True):
            assert torch.equal(found, expected)
        assert graphs.stats.replays == 3 * (TOKENS - 1) - 1  # one eager step, the first


def test_a_returned_cache_is_not_overwritten_by_the_next_generation(llama: Any, device: torch.device) -> None:
    with graphed(llama):
        settings = GREEDY | {"return_dict_in_generate": True}
        cache = llama.generate(**tiny.prompts([6], device), **settings)[CACHE]
        before = [layer.keys.clone() for layer in cache.layers]
        llama.generate(**tiny.prompts([9], device, seed=5), **settings)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_numbers_that_are_not_finite_stay_in_the_generation_they_came_from(
    llama: Any, plain: Any, device: torch.device
) -> None:
    batch = tiny.prompts([5], device)
    with graphed(llama) as graphs:
        llama.generate(**tiny.prompts([30], device), **GREEDY)
        for keys, values in (memory.values() for memory in graphs._step.store._self_attention):
            keys[:, :, 20:], values[:, :, 20:] = float("nan"), float("inf")
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))


def test_a_cache_changed_between_steps_is_an_error(llama: Any, device: torch.device) -> None:
    cache = transformers.DynamicCache(config=llama.config)

    def crops(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 9:
            cache.crop(-1)
        return scores

    with graphed(llama), pytest.raises(sg.StaleGraphError, match="changed between two steps"):
        llama.generate(**tiny.prompts([6], device), **GREEDY, **{CACHE: cache}, logits_processor=[crops])


def test_an_encoder_whose_outputs_are_pooled_before_attention_is_refused(device: torch.device) -> None:
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    keys, hidden = torch.randn(2, 4, 5, 16, device=device), torch.randn(2, 10, 64, device=device)
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        part.update(keys, keys, 0)
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    kind = transformers.modeling_outputs.BaseModelOutput
    assert CacheLayout.of(own, cross, hidden[:, :5], kind).hidden == (64, torch.float32, kind)
    with pytest.raises(CannotBind, match="differ in length"):
        CacheLayout.of(own, cross, hidden, kind)
