"""Layers with a window see what eager's cache keeps: some models mask no token, and rely on it to drop older ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_lengths  # noqa: E402
import tiny_models as tiny  # noqa: E402
import tiny_states  # noqa: E402
from tiny_generation import CACHE, GREEDY, MODELS, TOKENS, graphed, inputs  # noqa: E402

WINDOW = 8
SETTINGS = tiny.LLAMA | {"sliding_window": WINDOW}
MOSHI = SETTINGS | tiny.HEADS | {"ffn_dim": 128, "num_key_value_heads": 4}
# Full masks, and windows that only their caches have.
CUT = {
    "moshi": lambda: transformers.MoshiForCausalLM(transformers.MoshiConfig(**MOSHI)),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**SETTINGS, num_experts=4, num_experts_per_tok=2)
    ),
}
FAMILIES = MODELS | tiny_states.MODELS | tiny_lengths.MODELS | CUT
del FAMILIES["bloom"]  # which fails past such a window itself
EAGER = ("nllb_moe",)


def pair(name: str, device: torch.device) -> tuple[Any, Any]:
    """Two models whose config has a window, from which caches take it, whether or not masks do."""
    plain, model = (tiny.build(FAMILIES[name], device) for _ in range(2))
    for each in (plain, model):
        each.config.get_text_config(decoder=True).sliding_window = WINDOW
    return plain, model


def layers(result: Any) -> list[Any]:
    cache = result.get(CACHE, result.get("cache_params"))
    return list(getattr(cache, "self_attention_cache", cache).layers)


@pytest.mark.parametrize("name", FAMILIES)
def test_generations_across_the_window_give_plain_tokens_and_leave_plain_caches(
    name: str, device: torch.device
) -> None:
    if name == "trocr_sinusoidal" and device.type == "cuda":
        pytest.skip("transformers makes its table of positions on the CPU and looks it up by indices on the GPU")
    plain, model = pair(name, device)
    with graphed(model) as graphs:
        # From within the window past it, and from past it on.
        for lengths in ([3], [WINDOW + 4, 9], [WINDOW - 1]):
            batch = inputs(name, lengths, device) if name in MODELS else tiny.prompts(lengths, device)
            results = [each.generate(**batch, **GREEDY, return_dict_in_generate=True) for each in (plain, model)]
            assert torch.equal(results[0].sequences, results[1].sequences)
            for expected, found in zip(*map(layers, results), strict=True):
                assert type(found) is type(expected)
                if getattr(expected, "keys", None) is not None and expected.keys.numel():
                    assert found.get_seq_length() == expected.get_seq_length()
                    torch.testing.assert_close(found.keys, expected.keys, rtol=1e-3, atol=1e-3)
                    torch.testing.assert_close(found.values, expected.values, rtol=1e-3, atol=1e-3)
        assert bool(graphs.stats.replays) is (name not in EAGER)
        assert (Reason.GENERATION in graphs.stats.eager) is (name in EAGER)  # served past the window, too


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"tokens_per_launch": 4}])
@pytest.mark.parametrize("name", ["moshi", "mistral", "gemma2"])
def test_beams_and_launches_across_the_window(name: str, settings: dict[str, int], device: torch.device) -> None:
    plain, model = pair(name, device)
    beams = {"num_beams": settings.get("num_beams", 1)}
    launches = {"tokens_per_launch": settings.get("tokens_per_launch", 1)}
    with graphed(model, **launches) as graphs:
        for seed in range(3):
            batch = tiny.prompts([5, 4], device, seed)
            assert torch.equal(model.generate(**batch, **GREEDY, **beams), plain.generate(**batch, **GREEDY, **beams))
        assert graphs.stats.replays
        # Steps past the window are launched as soon as one was compared.
        assert (graphs.stats.replays < 2 * TOKENS) is ("tokens_per_launch" in settings)


def test_a_window_that_some_layers_caches_have_and_no_mask_is_refused(device: torch.device) -> None:
    """A mask hides tokens from all layers, and here only one drops them."""
    types = ["sliding_attention", "full_attention"]
    config = transformers.LlamaConfig(**SETTINGS, layer_types=types)
    plain, model = (tiny.build(lambda: transformers.LlamaForCausalLM(config), device) for _ in range(2))
    with graphed(model) as graphs:
        for length in (3, 12, 5):
            batch = tiny.prompts([length], device)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.GENERATION] == 3
        assert "past a window of its layers" in str(graphs.report())
        assert graphs.stats.replays  # up to the window


def test_a_cache_changed_before_the_step_past_its_window_is_an_error(device: torch.device) -> None:
    _, model = pair("mistral", device)
    cache = transformers.DynamicCache(config=model.config)

    def shortens(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == WINDOW:  # the next step is compared with the model's own
            cache.layers[0].keys = cache.layers[0].keys[:, :, 1:]
        return scores

    with graphed(model), pytest.raises(sg.StaleGraphError, match="changed between two steps"):
        model.generate(**tiny.prompts([3], device), **GREEDY, **{CACHE: cache}, logits_processor=[shortens])


def test_kyutai_runs_eagerly_across_its_windows(device: torch.device) -> None:
    """Its steps take a token and codes of audio per row, which no graph serves."""
    codec = {
        "model_type": "mimi",
        "hidden_size": 32,
        "num_filters": 8,
        "upsampling_ratios": [8, 4],
        "upsample_groups": 32,
    }
    codec |= {"codebook_size": 16, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "num_quantizers": 4}
    codec |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    codec |= {"intermediate_size": 64, "sampling_rate": 16000, "frame_rate": 250.0, "sliding_window": WINDOW}
    settings = MOSHI | {"codec_config": codec, "codebook_vocab_size": 17, "num_codebooks": 4, "frame_size": 64}
    config = transformers.KyutaiSpeechToTextConfig(**settings, audio_bos_token_id=16, audio_pad_token_id=15)
    make = transformers.KyutaiSpeechToTextForConditionalGeneration
    plain, model = (tiny.build(lambda: make(config), device) for _ in range(2))
    torch.manual_seed(0)
    given = {"input_values": torch.randn(2, 1, 64 * 20).to(device), "max_new_tokens": 18, "do_sample": False}
    expected = plain.generate(**given)
    assert expected.shape[1] > WINDOW
    with graphed(model) as graphs:
        assert torch.equal(model.generate(**given), expected)
        assert graphs.stats.eager[Reason.OPAQUE_ARGUMENT] == 1
