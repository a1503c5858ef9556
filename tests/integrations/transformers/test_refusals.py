"""Calls that graphs cannot serve run eagerly, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
import tiny_states  # noqa: E402
from tiny_generation import CACHE, GREEDY, MODELS, TOKENS, graphed  # noqa: E402

from simplegraph.integrations.transformers import GraphedGeneration, graph_encoder, graph_generation  # noqa: E402
from tests.support.where import without_gpu  # noqa: E402


def check_refused(
    reason: Reason, detail: str, model: Any, plain: Any, batch: dict[str, Any], compared: int = 0, **settings: Any
) -> GraphedGeneration:
    """Both models generate the same, no step is a replay, and the reason is counted and reported with its detail.

    So many replays are `compared` with the model's own step, and not served.
    """
    with graphed(model) as graphs:
        for count in (1, 2):
            found, expected = (one.generate(**batch, **(GREEDY | settings)) for one in (model, plain))
            assert torch.equal(found, expected)
            assert graphs.stats.eager[reason] == count
        assert graphs.stats.replays == compared
        assert reason.text in str(graphs.report())
        assert detail in graphs.stats.details.get(reason, "")
        return graphs


def test_beams_that_the_model_reorders_itself(llama: Any, plain: Any, device: torch.device) -> None:
    def reorder(cache: Any, order: torch.Tensor) -> Any:
        cache.reorder_cache(order)
        return cache

    llama._reorder_cache = reorder
    check_refused(
        Reason.GENERATION,
        "the model reorders its cache itself",
        llama,
        plain,
        tiny.prompts([6, 4], device),
        num_beams=2,
    )


def test_assisted_decoding(llama: Any, plain: Any, device: torch.device) -> None:
    check_refused(Reason.GENERATION, "", llama, plain, tiny.prompts([6], device), prompt_lookup_num_tokens=2)


def test_a_model_that_assists_another(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6], device)
    with graphed(llama) as graphs:
        found = plain.generate(**batch, **GREEDY, assistant_model=llama)
        assert torch.equal(found, plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == 0
        assert graphs.stats.eager[Reason.GENERATION]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"cache_implementation": "static"}, "a StaticCache"), ({"use_cache": False}, "use_cache=False")],
)
def test_other_caches(settings: dict[str, Any], said: str, llama: Any, plain: Any, device: torch.device) -> None:
    check_refused(Reason.GENERATION, said, llama, plain, tiny.prompts([6, 4], device), **settings)


def test_layers_of_another_kind(llama: Any, plain: Any, device: torch.device) -> None:
    class OwnLayer(transformers.cache_utils.DynamicLayer):
        pass

    batch = tiny.prompts([6], device)
    with graphed(llama) as graphs:
        for count in (1, 2):
            found, expected = (
                one.generate(**batch, **GREEDY, **{CACHE: cache})
                for one, cache in ((llama, transformers.DynamicCache()), (plain, transformers.DynamicCache()))
                if setattr(cache, "layer_class_to_replicate", OwnLayer) is None
            )
            assert torch.equal(found, expected)
            assert graphs.stats.eager[Reason.GENERATION] == count
        assert graphs.stats.details[Reason.GENERATION] == "a OwnLayer in the cache"
        assert graphs.stats.replays == 0


@without_gpu
@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="needs a newer transformers")
def test_layers_with_keys_of_an_indexer(device: torch.device) -> None:
    def make() -> Any:
        return transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**tiny.DEEPSEEK_V32))

    plain, model = (tiny.build(make, device) for _ in range(2))
    batch = tiny.prompts([6, 4], device)
    check_refused(Reason.GENERATION, "a DynamicIndexedLayer in the cache", model, plain, batch)
    encoder = graph_encoder(model, capture_sizes=[2])
    with torch.inference_mode():
        for _ in range(6):
            found, expected = (one(**batch, use_cache=False).logits for one in (model, plain))
            torch.testing.assert_close(found, expected)
    # Its indexer picks the best positions of the whole length, so a length is not padded but gets graphs of its own.
    assert "aten.topk" in encoder.stats.details[Reason.LENGTH_PADDING]
    assert encoder.stats.eager[Reason.LENGTH_PADDING] == 1
    assert encoder.stats.replays
    encoder.remove()


@without_gpu
@pytest.mark.parametrize("name", ["Rwkv", "MiniMax"])
def test_states_that_generate_does_not_hold(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(tiny_states.ELSEWHERE[name], device) for _ in range(2))
    detail = "generate gives this model none: it keeps its states in itself"
    check_refused(Reason.GENERATION, detail, model, plain, tiny.prompts([6, 4], device))


def test_states_on_modules_are_inputs_and_outputs_of_graphs(device: torch.device) -> None:
    plain, model = (tiny.build(tiny_states.ELSEWHERE["RecurrentGemma"], device) for _ in range(2))
    with graphed(model) as graphs:
        for lengths in ([7, 4, 6], [1], [1], [7, 4, 6]):
            batch = tiny.prompts(lengths, device)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays > 2 * TOKENS, graphs.report()
        assert not graphs.stats.failures


def test_hidden_states_of_every_step(llama: Any, device: torch.device) -> None:
    settings = GREEDY | {"return_dict_in_generate": True, "output_hidden_states": True}
    with graphed(llama) as graphs:
        result = llama.generate(**tiny.prompts([6], device), **settings)
        assert len(result.hidden_states) == TOKENS
        assert graphs.stats.eager[Reason.UNSUPPORTED_OUTPUT] == 1
        assert graphs.stats.replays == 0
        llama.generate(**tiny.prompts([6], device), **GREEDY)  # what transformers leaves behind is no hindrance
        assert graphs.stats.replays == TOKENS - 2


def test_a_batch_that_grows_beyond_the_largest(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama, max_batch_size=2) as graphs:
        for rows in (2, 3, 2, 1):
            batch = tiny.prompts([6] * rows, device, rows)
            assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.BATCH_TOO_LARGE] == 1
        on_the_way = graphs.stats.eager[Reason.FIRST_CALL] + graphs.stats.eager[Reason.WARMUP]
        assert graphs.stats.replays == 3 * (TOKENS - 1) - on_the_way > 2 * TOKENS


def test_a_prompt_longer_than_the_cache(llama: Any, plain: Any, device: torch.device) -> None:
    check_refused(Reason.LENGTH_TOO_LARGE, "max_length is 64", llama, plain, tiny.prompts([70, 30], device))


@pytest.mark.parametrize("max_length", [64, 67])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_sequence_that_outgrows_the_cache_goes_on_without_it(
    name: str, max_length: int, device: torch.device
) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    batch = tiny.prompts([58, 30], device)
    with graphed(model, max_length=max_length) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.LENGTH_TOO_LARGE] == 1
        assert graphs.stats.replays == max_length - 58 - 1


def test_training_mode(llama: Any, plain: Any, device: torch.device) -> None:
    for model in (llama, plain):
        model.train()
    check_refused(Reason.TRAINING, "", llama, plain, tiny.prompts([6], device))


def test_gradient_checkpointing_is_no_hindrance_but_for_the_hook_that_it_sets(
    llama: Any, plain: Any, device: torch.device
) -> None:
    llama.gradient_checkpointing_enable()
    batch = tiny.prompts([6], device)
    with graphed(llama) as graphs:
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        hooked = bool(llama.get_input_embeddings()._forward_hooks)  # so that embeddings require grad; since 5.18 or so
        assert (graphs.stats.replays, graphs.stats.eager[Reason.HOOKS]) == ((0, 1) if hooked else (TOKENS - 2, 0))


def test_hooks_of_submodules_fire_at_every_step(llama: Any, plain: Any, device: torch.device) -> None:
    fired = []
    handle = llama.model.layers[1].mlp.register_forward_hook(lambda *args: fired.append(1))
    check_refused(Reason.HOOKS, "model.layers.1.mlp", llama, plain, tiny.prompts([6], device))
    assert len(fired) == 2 * TOKENS
    handle.remove()


def test_hooks_that_come_after_the_capture_fire_too(llama: Any, plain: Any, device: torch.device) -> None:
    fired = []
    batch = tiny.prompts([6], device)
    with graphed(llama) as graphs:
        llama.generate(**batch, **GREEDY)
        handle = llama.model.layers[0].register_forward_pre_hook(lambda *args: fired.append(1))
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert len(fired) == TOKENS
        handle.remove()
        replays = graphs.stats.replays
        llama.generate(**batch, **GREEDY)
        assert graphs.stats.replays >= replays + TOKENS - 3


def test_hooks_of_the_model_itself_fire_around_replays(llama: Any, device: torch.device) -> None:
    fired = []
    llama.register_forward_hook(lambda *args: fired.append(1))
    with graphed(llama) as graphs:
        llama.generate(**tiny.prompts([6], device), **GREEDY)
        assert len(fired) == TOKENS
        assert graphs.stats.replays == TOKENS - 2


def test_a_model_spread_by_a_device_map(llama: Any, plain: Any, device: torch.device) -> None:
    llama.hf_device_map = {"model": 0, "lm_head": 1}
    check_refused(Reason.WRONG_DEVICE, "device_map over 0, 1", llama, plain, tiny.prompts([6], device))


def test_a_model_offloaded_by_accelerate(llama: Any, plain: Any, device: torch.device) -> None:
    llama.model.layers[0]._hf_hook = object()
    check_refused(Reason.WRONG_DEVICE, "an accelerate hook at model.layers.0", llama, plain, tiny.prompts([6], device))


def test_experts_that_are_picked_in_python_are_named_with_their_line(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["mixtral"], device) for _ in range(2))
    for one in (plain, model):
        one.set_experts_implementation("eager")
    graphs = check_refused(Reason.CAPTURE_FAILED, "", model, plain, tiny.prompts([6, 4, 5], device))
    assert any(
        "modeling_mixtral.py" in failure and "nonzero()" in failure for failure in graphs.stats.failures.values()
    )
    for failure in graphs.stats.failures.values():
        assert "such calls run as they do without graphs" in failure.lower()
        assert "PIECEWISE" not in failure, "graph_generation has no modes"


def test_a_model_that_takes_the_last_key_for_the_present_one(device: torch.device) -> None:
    def gpt_neo() -> Any:
        shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512, "window_size": 8}
        config = transformers.GPTNeoConfig(**tiny.COMMON, **shape, attention_types=[[["global", "local"], 1]])
        return transformers.GPTNeoForCausalLM(config)

    plain, model = (tiny.build(gpt_neo, device) for _ in range(2))
    batch = tiny.prompts([6, 4, 5], device)
    check_refused(Reason.GENERATION, "differs by up to", model, plain, batch, compared=1)


def test_a_model_that_needs_its_length_in_python_is_named_with_its_line(device: torch.device) -> None:
    class Counting(transformers.LlamaForCausalLM):
        def forward(self, **kwargs: Any) -> Any:
            known = kwargs[CACHE].get_seq_length()
            if not isinstance(known, int):
                raise TypeError("a length, please")
            return super().forward(**kwargs)

    plain, model = (tiny.build(lambda: Counting(transformers.LlamaConfig(**tiny.LLAMA)), device) for _ in range(2))
    with graphed(model) as graphs:
        for count in (1, 2):
            batch = tiny.prompts([6, 4], device)
            found, expected = (one.generate(**batch, **GREEDY) for one in (model, plain))
            assert torch.equal(found, expected)
            assert graphs.stats.eager[Reason.GENERATION] == count
        assert graphs.stats.replays == 0


def test_no_memory_for_the_cache(llama: Any, plain: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("simplegraph.integrations.transformers.generate.decoder.CacheStore", full)
    check_refused(
        Reason.LENGTH_TOO_LARGE, "lower max_batch_size or max_length", llama, plain, tiny.prompts([6, 4], device)
    )


@pytest.mark.parametrize("function", [graph_generation, graph_encoder])
def test_a_model_of_a_decorated_class_is_told_of_the_class(function: Any) -> None:
    """Unwrapping alone would not help: the class itself has graphs."""
    model = tiny.DECODERS["gpt2"]()
    kind = type("Decorated", (type(model),), {})
    model.__class__ = sg.cuda_graph(kind)
    with pytest.raises(sg.ConfigError, match=r"Decorated that has graphs itself.* away from its class"):
        function(model)
    model = tiny.DECODERS["gpt2"]()
    with pytest.raises(sg.ConfigError, match="unwrap"):
        function(sg.wrap(model))
