"""`generate` through graphs gives what plain `generate` gives, from replays, or says why it did not use them."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import GraphedGeneration, graph_generation  # noqa: E402

TOKENS = 12
GREEDY = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
MODELS = tiny.DECODERS | tiny.MIXTURES | tiny.ENCODER_DECODERS


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def inputs(name: str, lengths: list[int], device: torch.device, seed: int = 1) -> dict[str, torch.Tensor]:
    if name == "whisper":
        start = torch.tensor([[1, 5]] * len(lengths), device=device)
        return tiny.features(len(lengths), device, seed) | {"decoder_input_ids": start}
    return tiny.prompts(lengths, device, seed)


def graphed(model: Any, **sizes: Any) -> GraphedGeneration:
    return graph_generation(model, **({"max_batch_size": 4, "max_length": 64} | sizes))


@pytest.fixture
def llama(device: torch.device) -> Any:
    return tiny.build(tiny.DECODERS["llama"], device)


@pytest.fixture
def plain(device: torch.device) -> Any:
    return tiny.build(tiny.DECODERS["llama"], device)


# The same tokens, from replays.


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
        assert graphs.stats.replays == 4 * (TOKENS - 1) - 2  # the first step with either


def test_guidance_has_a_cache_of_its_own_and_runs_as_it_did(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6], device)
    settings = GREEDY | {"guidance_scale": 1.5}
    with graphed(llama) as graphs:
        assert torch.equal(llama.generate(**batch, **settings), plain.generate(**batch, **settings))
        assert graphs.stats.replays == TOKENS - 2
        assert graphs.stats.eager[Reason.CACHE_KIND] == 1


def test_eager_attention_too_or_the_line_in_the_way(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["gemma2"], device) for _ in range(2))
    for one in (plain, model):
        one.set_attn_implementation("eager")
    batch = tiny.prompts([7, 4, 6], device)
    with graphed(model) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        # 5.17 makes a scalar on the host for every mask, which is a copy that no graph can hold.
        failed = "".join(graphs.stats.failures.values())
        assert graphs.stats.replays == (0 if "torch.tensor(0.0" in failed else TOKENS - 3)


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
        assert Reason.CACHE_FULL not in graphs.stats.eager
        batch = tiny.prompts([101], device)
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.CACHE_FULL] == 1


def test_two_models_in_one_pool(device: torch.device) -> None:
    names, pool = ("llama", "gpt2"), sg.graph_pool(device)
    plain, models = ([tiny.build(MODELS[name], device) for name in names] for _ in range(2))
    handles = [graph_generation(model, max_batch_size=2, max_length=64, pool=pool) for model in models]
    for _ in range(3):
        for one, other in zip(plain, models, strict=True):
            batch = tiny.prompts([6, 4], device)
            assert torch.equal(other.generate(**batch, **GREEDY), one.generate(**batch, **GREEDY))
    assert all(handle.stats.replays == 3 * (TOKENS - 1) - 1 for handle in handles)


# Caches.


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "t5", "whisper"])
def test_the_returned_cache_holds_what_plain_generate_leaves(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    batch = inputs(name, [7, 4, 6], device)
    with graphed(model):
        for _ in range(2):
            caches = [
                m.generate(**batch, **GREEDY, return_dict_in_generate=True).past_key_values for m in (plain, model)
            ]
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
        model.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1].past_key_values))
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
            said = model.generate(said, **GREEDY, past_key_values=cache)
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
        cache = llama.generate(**tiny.prompts([6], device), **settings).past_key_values
        before = [layer.keys.clone() for layer in cache.layers]
        llama.generate(**tiny.prompts([9], device, seed=5), **settings)
        assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_numbers_that_are_not_finite_stay_in_the_generation_they_came_from(
    llama: Any, plain: Any, device: torch.device
) -> None:
    batch = tiny.prompts([5], device)
    with graphed(llama) as graphs:
        llama.generate(**tiny.prompts([30], device), **GREEDY)
        step = graphs._decoder._step
        for keys, values in step.store._pairs:
            keys[:, :, 20:], values[:, :, 20:] = float("nan"), float("inf")
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))


# What changes between calls.


def test_weights_changed_in_place_and_replaced_are_never_stale(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7, 4], device)
    with graphed(llama) as graphs:
        before = llama.generate(**batch, **GREEDY)
        for model in (llama, plain):
            model.lm_head.weight.data.mul_(-1)
        changed = llama.generate(**batch, **GREEDY)
        assert torch.equal(changed, plain.generate(**batch, **GREEDY))
        assert not torch.equal(changed, before)
        torch.manual_seed(7)
        other = torch.randn_like(llama.model.norm.weight)
        for model in (llama, plain):
            model.model.norm.weight = torch.nn.Parameter(other.clone())
        again = llama.generate(**batch, **GREEDY)
        assert torch.equal(again, plain.generate(**batch, **GREEDY))
        assert not torch.equal(again, changed)
        assert graphs.stats.recaptures == 1
        replays = graphs.stats.replays
        llama.generate(**batch, **GREEDY)
        assert graphs.stats.replays == replays + TOKENS - 1


def test_attention_chosen_otherwise_and_adapters_switched_are_never_stale(
    llama: Any, plain: Any, device: torch.device
) -> None:
    class Adapter(torch.nn.Linear):
        active_adapters, disable_adapters = ("a",), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 if self.disable_adapters else -1)

    batch = tiny.prompts([7, 4], device)
    for model in (llama, plain):
        adapter = Adapter(64, tiny.VOCABULARY, bias=False, device=device)
        adapter.weight = model.lm_head.weight
        model.lm_head = adapter
    with graphed(llama) as graphs:
        found = []
        for disabled in (False, True, False):
            for model in (llama, plain):
                model.lm_head.disable_adapters = disabled
            found.append(llama.generate(**batch, **GREEDY))
            assert torch.equal(found[-1], plain.generate(**batch, **GREEDY))
        assert not torch.equal(found[0], found[1])
        assert graphs.stats.captures == 3


@pytest.mark.parametrize("variable", ["VERIFY=2", "DEBUG=1", "CAPTURE_SIZES=3,6", "MODE=none", "PADDING=0"])
def test_settings_from_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch, llama: Any, plain: Any, device: torch.device
) -> None:
    monkeypatch.setenv(*f"SIMPLEGRAPH_{variable}".split("="))
    with graphed(llama) as graphs:
        for lengths in ([5, 6], [4], [7, 3, 4], [4, 4, 4, 4]):
            batch = tiny.prompts(lengths, device)
            for _ in range(2):
                assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert bool(graphs.stats.replays) is (variable != "MODE=none")
        assert not graphs.stats.failures


def test_a_model_of_another_dtype_gets_another_cache(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([7, 4], device)
    with graphed(llama) as graphs:
        llama.generate(**batch, **GREEDY)
        for model in (llama, plain):
            model.to(torch.float64)
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == 2 * (TOKENS - 2)


class Int8Linear(torch.nn.Module):
    """A linear layer of int8 weights with a scale for each row, both in buffers, as libraries for it have them."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=torch.int8))
        self.register_buffer("scales", torch.empty_like(linear.weight[:, :1]))
        self.quantise(linear.weight)

    def quantise(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.scales.copy_(weight.abs().amax(1, keepdim=True) / 127)
            self.weight.copy_((weight / self.scales).round())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scales)


def test_quantised_layers_requantised_in_place_and_replaced(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6, 4], device)
    unquantised = plain.generate(**batch, **GREEDY)
    for layer in (layer for model in (llama, plain) for layer in model.model.layers):
        layer.mlp.down_proj = Int8Linear(layer.mlp.down_proj)
    with graphed(llama) as graphs:

        def same() -> torch.Tensor:
            found, expected = (model.generate(**batch, **GREEDY) for model in (llama, plain))
            assert torch.equal(found, expected)
            return expected

        seen = [unquantised, same()]
        for change in ("in place", "replaced"):
            torch.manual_seed(len(change))
            weight = torch.randn(llama.config.hidden_size, llama.config.intermediate_size, device=device)
            for layer in (layer for model in (llama, plain) for layer in model.model.layers):
                if change == "in place":
                    layer.mlp.down_proj.quantise(weight)
                else:
                    layer.mlp.down_proj.weight = -layer.mlp.down_proj.weight
            seen.append(same())
        assert not any(torch.equal(seen[-1], earlier) for earlier in seen[:-1])
        assert not torch.equal(seen[1], seen[2])
        assert graphs.stats.replays >= 3 * (TOKENS - 3)
        assert graphs.stats.captures == 2  # in place, the graph reads the new numbers


def test_a_generation_after_one_that_failed(llama: Any, plain: Any, device: torch.device) -> None:
    def breaks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 9:
            raise ValueError("the user's own")
        return scores

    batch = tiny.prompts([6, 4], device)
    with graphed(llama) as graphs:
        for _ in range(2):
            with pytest.raises(ValueError, match="the user's own"):
                llama.generate(**batch, **GREEDY, logits_processor=[breaks])
            assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays > TOKENS
        assert Reason.BUSY not in graphs.stats.eager


def test_two_threads_at_once_both_get_their_tokens(llama: Any, plain: Any, device: torch.device) -> None:
    batches = [tiny.prompts([6, 4], device, seed) for seed in range(2)]
    expected = [plain.generate(**batch, **GREEDY) for batch in batches]
    inside, found = threading.Barrier(2), [torch.empty(0)] * 2

    def meet(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 8:
            inside.wait(timeout=60)  # both are in the middle of their generation
        return scores

    def run(index: int) -> None:
        found[index] = llama.generate(**batches[index], **GREEDY, logits_processor=[meet])

    with graphed(llama) as graphs:
        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert graphs.stats.eager[Reason.BUSY] == 1
        assert graphs.stats.replays


def test_forwards_of_the_users_own_run_as_they_are(llama: Any, plain: Any, device: torch.device) -> None:
    ids = tiny.prompts([6], device)["input_ids"]
    with graphed(llama), torch.no_grad():
        found, expected = llama(ids), plain(ids)
        assert torch.equal(found.logits, expected.logits)
        step = {"input_ids": ids[:, -1:], "past_key_values": found.past_key_values}
        assert llama(**step).past_key_values.get_seq_length() == 7


# Installing and removing.


def test_remove_gives_the_model_back(llama: Any, plain: Any, device: torch.device) -> None:
    batch, kind, attributes = tiny.prompts([6], device), type(llama), set(vars(llama))
    graphs = graphed(llama)
    assert isinstance(llama, kind)
    assert set(vars(llama)) == attributes
    llama.generate(**batch, **GREEDY)
    replays = graphs.stats.replays
    graphs.remove()
    graphs.remove()
    assert type(llama) is kind
    assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
    assert graphs.stats.replays == replays > 0


def test_a_second_call_takes_the_place_of_the_first(llama: Any, device: torch.device) -> None:
    first, second = graphed(llama), graphed(llama, max_batch_size=2)
    llama.generate(**tiny.prompts([6], device), **GREEDY)
    assert (first.stats.replays, second.stats.replays) == (0, TOKENS - 2)
    first.remove()  # which is not there any more
    llama.generate(**tiny.prompts([6], device), **GREEDY)
    assert second.stats.replays == 2 * TOKENS - 3
    second.remove()


def test_copies_and_pickles_are_plain_models(llama: Any, plain: Any, device: torch.device) -> None:
    batch, kind = tiny.prompts([6], device), type(llama)
    expected = plain.generate(**batch, **GREEDY)
    with graphed(llama) as graphs:
        llama.generate(**batch, **GREEDY)
        replays = graphs.stats.replays
        for other in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
            assert type(other) is kind
            other.lm_head.weight.data.mul_(1)
            assert torch.equal(other.generate(**batch, **GREEDY), expected)
        assert graphs.stats.replays == replays


def test_what_is_no_model_is_refused(llama: Any) -> None:
    with pytest.raises(sg.ConfigError, match="expected a model of transformers that can generate"):
        graph_generation(torch.nn.Linear(2, 2))
    with pytest.raises(sg.ConfigError, match="wrapped already"):
        graph_generation(sg.wrap(llama))
    for size in (0, -1, 2.5, True):
        with pytest.raises(sg.ConfigError, match="max_length is"):
            graph_generation(llama, max_length=size)  # type: ignore[arg-type]
    assert type(llama) is transformers.LlamaForCausalLM


# What graphs cannot serve runs as before, and the report says why.


def refused(reason: Reason, model: Any, plain: Any, batch: dict[str, Any], **settings: Any) -> GraphedGeneration:
    """Both models generate the same, no step is a replay, and the reason is counted for each generation."""
    with graphed(model) as graphs:
        for count in (1, 2):
            found, expected = (one.generate(**batch, **(GREEDY | settings)) for one in (model, plain))
            assert torch.equal(found, expected)
            assert graphs.stats.eager[reason] == count
        assert graphs.stats.replays == 0
        assert reason.text in str(graphs.report())
        return graphs


def test_beam_search(llama: Any, plain: Any, device: torch.device) -> None:
    refused(Reason.DECODING_MODE, llama, plain, tiny.prompts([6, 4], device), num_beams=2)


def test_assisted_decoding(llama: Any, plain: Any, device: torch.device) -> None:
    refused(Reason.DECODING_MODE, llama, plain, tiny.prompts([6], device), prompt_lookup_num_tokens=2)


def test_a_model_that_assists_another(llama: Any, plain: Any, device: torch.device) -> None:
    batch = tiny.prompts([6], device)
    with graphed(llama) as graphs:
        found = plain.generate(**batch, **GREEDY, assistant_model=llama)
        assert torch.equal(found, plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == 0
        assert graphs.stats.eager[Reason.DECODING_MODE]


@pytest.mark.parametrize("settings", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_other_caches(settings: dict[str, Any], llama: Any, plain: Any, device: torch.device) -> None:
    refused(Reason.CACHE_KIND, llama, plain, tiny.prompts([6, 4], device), **settings)


def test_layers_without_keys_and_values(device: torch.device) -> None:
    def qwen3_next() -> Any:
        linear = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2)
        linear |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
        layers = {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2}
        config = transformers.Qwen3NextConfig(**(tiny.LLAMA | tiny.HEADS | linear | layers))
        return transformers.Qwen3NextForCausalLM(config)

    plain, model = (tiny.build(qwen3_next, device) for _ in range(2))
    refused(Reason.CACHE_KIND, model, plain, tiny.prompts([6], device))


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
    refused(Reason.CACHE_FULL, llama, plain, tiny.prompts([70, 30], device))


@pytest.mark.parametrize("max_length", [64, 67])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_sequence_that_outgrows_the_cache_goes_on_without_it(
    name: str, max_length: int, device: torch.device
) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    batch = tiny.prompts([58, 30], device)
    with graphed(model, max_length=max_length) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.eager[Reason.CACHE_FULL] == 1
        assert graphs.stats.replays == max_length - 58 - 1


def test_training_mode(llama: Any, plain: Any, device: torch.device) -> None:
    for model in (llama, plain):
        model.train()
    refused(Reason.TRAINING, llama, plain, tiny.prompts([6], device))


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
    refused(Reason.HOOKS, llama, plain, tiny.prompts([6], device))
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
    refused(Reason.SPREAD_MODEL, llama, plain, tiny.prompts([6], device))


def test_a_model_offloaded_by_accelerate(llama: Any, plain: Any, device: torch.device) -> None:
    llama.model.layers[0]._hf_hook = object()
    refused(Reason.SPREAD_MODEL, llama, plain, tiny.prompts([6], device))


def test_experts_that_are_picked_in_python_are_named_with_their_line(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["mixtral"], device) for _ in range(2))
    for one in (plain, model):
        one.set_experts_implementation("eager")
    graphs = refused(Reason.CAPTURE_FAILED, model, plain, tiny.prompts([6, 4, 5], device))
    assert any(
        "modeling_mixtral.py" in failure and "nonzero()" in failure for failure in graphs.stats.failures.values()
    )


def test_a_model_that_takes_the_last_key_for_the_present_one(device: torch.device) -> None:
    def gpt_neo() -> Any:
        shape = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512, "window_size": 8}
        config = transformers.GPTNeoConfig(**tiny.COMMON, **shape, attention_types=[[["global", "local"], 1]])
        return transformers.GPTNeoForCausalLM(config)

    plain, model = (tiny.build(gpt_neo, device) for _ in range(2))
    refused(Reason.FIXED_CACHE, model, plain, tiny.prompts([6, 4, 5], device))


def test_a_model_that_needs_its_length_in_python_is_named_with_its_line(device: torch.device) -> None:
    class Counting(transformers.LlamaForCausalLM):
        def forward(self, past_key_values: Any = None, **kwargs: Any) -> Any:
            known = past_key_values.get_seq_length()
            if not isinstance(known, int):
                raise TypeError("a length, please")
            return super().forward(past_key_values=past_key_values, **kwargs)

    plain, model = (tiny.build(lambda: Counting(transformers.LlamaConfig(**tiny.LLAMA)), device) for _ in range(2))
    with graphed(model) as graphs:
        for count in (1, 2):
            batch = tiny.prompts([6, 4], device)
            found, expected = (one.generate(**batch, **GREEDY) for one in (model, plain))
            assert torch.equal(found, expected)
            assert graphs.stats.eager[Reason.FIXED_CACHE] == count
        assert graphs.stats.replays == 0


def test_no_memory_for_the_cache(llama: Any, plain: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("simplegraph.integrations.transformers.generate.decoder.Store", full)
    refused(Reason.CACHE_FULL, llama, plain, tiny.prompts([6, 4], device))


def test_a_cache_changed_between_steps_is_an_error(llama: Any, device: torch.device) -> None:
    cache = transformers.DynamicCache(config=llama.config)

    def crops(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 9:
            cache.crop(-1)
        return scores

    with graphed(llama), pytest.raises(sg.StaleGraphError, match="changed between two steps"):
        llama.generate(**tiny.prompts([6], device), **GREEDY, past_key_values=cache, logits_processor=[crops])
