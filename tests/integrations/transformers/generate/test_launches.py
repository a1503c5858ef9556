"""Graphs of several decode steps: `generate` returns, draws, streams and leaves behind what it does without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from tiny_generation import CACHE, MODELS, graphed, inputs  # noqa: E402
from transformers.generation import utils as generation_utils  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from tests.support.where import without_gpu  # noqa: E402

STEPS, TOKENS = 4, 17  # the first two tokens and three launches leave three
FREE = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None}

pytestmark = pytest.mark.skipif(
    not hasattr(generation_utils, "StopCheck"), reason="this release of transformers asks for no check by name"
)


@pytest.fixture
def pair(device: torch.device) -> Iterator[tuple[Any, Any, Any]]:
    """The same model plain, and with graphs of several steps; the graphs."""
    plain, model = (tiny.build(tiny.DECODERS["llama"], device) for _ in range(2))
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        yield plain, model, graphs


def launches(graphs: Any) -> int:
    """Count the replays of graphs of several steps."""
    return sum(graph.replays for graph in graphs.stats.graphs.values() if "launch" in graph.inputs)


def ends(plain: Any, batch: dict[str, Any], at: int = 9) -> list[int]:
    """Tokens that end the rows of a batch, each some steps before the next."""
    free = plain.generate(**batch, **FREE)[:, batch["input_ids"].shape[1] :]
    return [int(row[at - 3 * index]) for index, row in enumerate(free)]


def both(
    plain: Any, model: Any, batch: dict[str, Any], settings: dict[str, Any], times: int = 2, seed: int = 5
) -> tuple[Any, Any]:
    """Generate on both some times, and compare the tokens and the next random numbers; return the last results."""
    for _ in range(times):
        results, after = [], []
        for one in (model, plain):
            torch.manual_seed(seed)
            results.append(one.generate(**batch, **settings))
            after.append(torch.rand(3, device=one.device))
        found, expected = (result if isinstance(result, torch.Tensor) else result.sequences for result in results)
        assert torch.equal(found, expected)
        assert torch.equal(*after)
    return results[0], results[1]


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "t5", "whisper"])
def test_tokens_are_those_of_single_steps(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        for seed, lengths in enumerate(([7, 4, 6], [6])):
            both(plain, model, inputs(name, lengths, device, seed), {"max_new_tokens": TOKENS, "do_sample": False}, 1)
            both(plain, model, inputs(name, lengths, device, seed), FREE)
        assert not graphs.stats.slower
        assert launches(graphs) >= 5


def test_most_steps_are_those_of_launches_and_none_is_in_vain(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([7, 4], device)
    both(plain, model, batch, FREE)
    before = launches(graphs), graphs.stats.replays
    both(plain, model, batch, FREE, 1)
    assert (launches(graphs) - before[0], graphs.stats.replays - before[1]) == (3, 3 + 1 + 3)  # 15 tokens after two


@pytest.mark.parametrize("lengths", [[7, 4], [7]])
def test_rows_that_end_early_end_where_they_did(lengths: list[int], pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    batch, new = tiny.prompts(lengths, device, seed=5), set()
    for at in range(3, 12):
        settings = FREE | {"eos_token_id": ends(plain, batch, at)}
        found, _ = both(plain, model, batch, settings, 1)
        new.add(found.shape[1] - 7)
    assert len(new) >= 5, "rows ended at all places of a launch"
    assert launches(graphs) > 5
    assert not graphs.stats.slower


def test_graphs_that_were_dropped_are_made_again(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    settings = FREE | {"do_sample": True, "temperature": 1.5, "eos_token_id": list(range(3, 18))}
    settings |= {"repetition_penalty": 1.2}
    for seed in range(4):
        both(plain, model, tiny.prompts([7, 4], device, seed=5), settings, 1, seed)
        graphs.reset()
    both(plain, model, tiny.prompts([7, 4], device, seed=5), FREE)
    assert launches(graphs)


@pytest.mark.parametrize("lengths", [[7, 4], [7]])
def test_draws_after_an_early_end_are_put_back(lengths: list[int], pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    batch, new = tiny.prompts(lengths, device, seed=5), set()
    settings = FREE | {"do_sample": True, "temperature": 1.5, "eos_token_id": list(range(3, 18))}
    for seed in range(7):
        found, _ = both(plain, model, batch, settings, 1, seed)
        new.add(found.shape[1] - 7)
    assert len(new - {TOKENS}) >= 3
    assert launches(graphs) > 5
    assert not graphs.stats.slower


def test_sampling_draws_what_it_did(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    settings = FREE | {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    settings |= {"eos_token_id": tiny.EOS, "min_new_tokens": 12, "typical_p": 0.95, "renormalize_logits": True}
    settings |= {"repetition_penalty": 1.2}
    for lengths in ([7, 4], [5]):
        both(plain, model, tiny.prompts(lengths, device), settings)
    assert launches(graphs) > 3
    assert not graphs.stats.slower


def test_the_processors_of_each_generation_cost_no_graph(pair: Any, device: torch.device) -> None:
    """They hold tensors of their own, of equal values, and end with their generation."""
    plain, model, graphs = pair
    settings = FREE | {"suppress_tokens": [20, 21]}
    for lengths in ([7, 4], [5], [9, 9, 2, 3], [7, 4], [5], [9, 9, 2, 3]):
        both(plain, model, tiny.prompts(lengths, device), settings, times=1)
    assert not graphs.stats.recaptures, graphs.report()
    assert not graphs.stats.slower


def test_padded_rows_would_draw_other_tokens_and_are_sampled_one_by_one(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    both(plain, model, tiny.prompts([7, 4, 5], device), FREE | {"do_sample": True})
    assert graphs.stats.slower == {Reason.ONE_TOKEN: 2}
    assert "add 3 rows to capture_sizes" in str(graphs.report())
    assert not launches(graphs)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_the_cache_is_that_of_the_tokens(name: str, device: torch.device) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    graphs, batch = graphed(model, tokens_per_launch=STEPS), tiny.prompts([7, 4], device)
    settings = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "eos_token_id": list(range(3, 19))}
    settings |= {"return_dict_in_generate": True, "min_new_tokens": 9, "repetition_penalty": 1.1}
    found, expected = both(plain, model, batch, settings)
    assert type(found) is type(expected)
    new = expected.sequences.shape[1] - 7
    assert 9 <= new < 30
    caches = found[CACHE], expected[CACHE]
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(layer.keys, other.keys)
        torch.testing.assert_close(layer.values, other.values)
    assert launches(graphs)


class Stream(BaseStreamer):
    """Keeps what it is shown, and raises at the token of a number."""

    def __init__(self, last: int = 99) -> None:
        self.shown: list[Any] = []
        self._last = last

    def put(self, value: torch.Tensor) -> None:
        self.shown.append(value.tolist())
        if len(self.shown) == self._last:
            raise KeyboardInterrupt

    def end(self) -> None:
        self.shown.append("end")


def test_a_streamer_is_shown_every_token_once(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([7], device)
    for settings in (FREE, FREE | {"eos_token_id": ends(plain, batch)}):
        shown = []
        for one in (model, plain, model):
            stream = Stream()
            one.generate(**batch, **settings, streamer=stream)
            shown.append(stream.shown)
        assert shown[0] == shown[1] == shown[2]
        assert shown[0][-1] == "end"
    assert launches(graphs)


@pytest.mark.parametrize("last", [5, 8, 9])
def test_a_streamer_that_stops_a_generation_leaves_what_it_did(last: int, pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    batch, settings = tiny.prompts([7], device), FREE | {"do_sample": True}
    both(plain, model, batch, settings)
    left = []
    for one in (model, plain):
        cache, stream = transformers.DynamicCache(config=one.config), Stream(last)
        torch.manual_seed(7)
        with pytest.raises(KeyboardInterrupt):
            one.generate(**batch, **settings, **{CACHE: cache}, streamer=stream)
        left.append((stream.shown, cache.get_seq_length(), torch.rand(2, device=device).tolist()))
    assert left[0] == left[1]
    both(plain, model, batch, settings, 1)
    assert launches(graphs)


def _double(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * 2


def _never(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"logits_processor": [_double]}, "function runs in Python after every token"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor runs in Python"),
        ({"stopping_criteria": [_never]}, "a function must be asked after every token"),
        ({"max_time": 100.0}, "a MaxTimeCriteria must be asked"),
        ({"max_new_tokens": 80}, "raise max_length"),
        ({"return_dict_in_generate": True, "output_scores": True}, "scores or logits of every token are returned"),
        ({"return_dict_in_generate": True, "output_logits": True}, "scores or logits of every token are returned"),
    ],
)
def test_what_must_run_after_every_token_does_and_the_report_says_so(
    settings: dict[str, Any], told: str, pair: Any, device: torch.device
) -> None:
    plain, model, graphs = pair
    both(plain, model, tiny.prompts([7, 4], device), FREE | settings, 1)
    assert graphs.stats.slower == {Reason.ONE_TOKEN: 1}
    assert told in str(graphs.report())
    assert graphs.report().to_dict()["slower"] == {"one_token": 1}
    assert graphs.stats.replays > 5
    assert not launches(graphs)


class OtherCheck(generation_utils.StopCheck):  # type: ignore[misc]
    """A check of the user's own."""


def sampling(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Decode in the user's own way, which reads the names by which transformers asks."""
    assert (StopCheck, _undo_generation_steps) == OWN[1:]
    return OWN[0](self, *args, **kwargs)


StopCheck, _undo_generation_steps = generation_utils.StopCheck, generation_utils._undo_generation_steps
OWN = transformers.GenerationMixin._sample, StopCheck, _undo_generation_steps


@pytest.mark.parametrize("case", ["a subclass's loop", "a replaced loop", "a replaced check", "a check of more"])
def test_a_loop_that_somebody_changed_takes_every_step_and_the_report_says_so(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = transformers.LlamaForCausalLM
    if case == "a subclass's loop":
        kind = type("Own", (kind,), {"_sample": sampling})
    elif case == "a replaced loop":
        monkeypatch.setattr(transformers.GenerationMixin, "_sample", sampling)
    elif case == "a replaced check":
        monkeypatch.setattr(generation_utils, "StopCheck", OtherCheck)
    else:  # as another version may ask
        check = generation_utils.StopCheck.__call__

        def ask(self: Any, unfinished: Any, tokens: Any, length: int, more: Any = None) -> bool:
            answer: bool = check(self, unfinished, tokens, length)
            return answer

        monkeypatch.setattr(generation_utils.StopCheck, "__call__", ask)
    plain, model = (tiny.build(lambda: kind(transformers.LlamaConfig(**tiny.LLAMA)), device) for _ in range(2))
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        both(plain, model, tiny.prompts([7, 4], device), FREE, 1)
        assert graphs.stats.slower == {Reason.ONE_TOKEN: 1}
        assert "a _sample that is not transformers' own, or asks another check" in str(graphs.report())
        assert graphs.stats.replays > 5
        assert not launches(graphs)


def test_hooks_on_the_model_run_around_every_step(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    calls: list[int] = []
    model.register_forward_hook(lambda *args: calls.append(1))
    both(plain, model, tiny.prompts([7], device), FREE, 1)
    assert len(calls) == TOKENS
    assert graphs.stats.slower == {Reason.ONE_TOKEN: 1}


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 8},
        {"min_length": 13},
        {"forced_eos_token_id": 4},
        {"suppress_tokens": [5, 6, 7]},
        {"remove_invalid_values": True},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "min_new_tokens": 6},
    ],
)
def test_processors_that_a_length_switches_are_switched_there(
    settings: dict[str, Any], pair: Any, device: torch.device
) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([7, 4], device)
    both(plain, model, batch, FREE | {"eos_token_id": ends(plain, batch, 5)} | settings)
    assert launches(graphs)
    assert not graphs.stats.slower


@pytest.mark.parametrize(
    ("settings", "graphs_made"),
    [
        ({"min_new_tokens": TOKENS}, 1),  # no end token in any launch
        ({"min_new_tokens": 8}, 2),  # none in the first launch
        ({"forced_eos_token_id": 4}, 1),  # at the last length, which is no launch's
        ({"min_new_tokens": TOKENS, "forced_eos_token_id": [4, 5]}, 1),
    ],
)
def test_prompts_of_all_lengths_share_the_graphs_of_a_launch(
    settings: dict[str, Any], graphs_made: int, pair: Any, device: torch.device
) -> None:
    plain, model, graphs = pair
    settings = FREE | {"eos_token_id": tiny.VOCABULARY - 1} | settings
    for length in range(2, 13):  # more lengths than there may be ways to choose tokens
        both(plain, model, tiny.prompts([length], device), settings, 1)
    assert not graphs.stats.slower
    made = [graph for graph in graphs.stats.graphs.values() if "launch" in graph.inputs]
    assert len(made) == graphs_made
    assert launches(graphs) >= 27, "three of each generation, but for some of the first calls"


def test_other_end_tokens_and_numbers_are_other_ways_to_choose(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([7], device)
    favourites = plain.generate(**batch, **FREE)[0, 7:].unique().tolist()
    for token in favourites[:3]:
        both(plain, model, batch, FREE | {"eos_token_id": token, "min_new_tokens": TOKENS})
    assert launches(graphs) >= 9
    assert not graphs.stats.slower


def test_an_end_token_that_is_forced_at_one_length_is_forced_at_no_other(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["t5"], device) for _ in range(2))
    forced = transformers.ForcedEOSTokenLogitsProcessor(2, 4, device=device)  # the first token after the start
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        both(plain, model, tiny.prompts([7, 4], device), FREE | {"logits_processor": [forced]})
        assert launches(graphs)


def test_no_step_is_taken_past_the_positions_that_a_model_has(device: torch.device) -> None:
    config = transformers.GPT2Config(**(tiny.GPT2 | {"n_positions": 24}))
    plain, model = (tiny.build(lambda: transformers.GPT2LMHeadModel(config), device) for _ in range(2))
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        both(plain, model, tiny.prompts([7, 4], device), FREE)
        assert launches(graphs)


def test_a_launch_ends_where_attention_reaches_further(device: torch.device) -> None:
    plain, model = (tiny.build(tiny.DECODERS["llama"], device) for _ in range(2))
    with graphed(model, max_length=320, tokens_per_launch=STEPS) as graphs:
        both(plain, model, tiny.prompts([249, 240], device), FREE)
        spans = {graph.inputs["span"] for graph in graphs.stats.graphs.values() if "launch" in graph.inputs}
        assert len(spans) == 2


@without_gpu
def test_states_that_cannot_be_put_back_are_kept_right(device: torch.device) -> None:
    config = transformers.MambaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4, pad_token_id=0
    )
    plain, model = (tiny.build(lambda: transformers.MambaForCausalLM(config), device) for _ in range(2))
    batch = {"input_ids": tiny.prompts([7, 7], device)["input_ids"]}
    settings = FREE | {"eos_token_id": ends(plain, batch)}
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        both(plain, model, batch, settings)
        found, expected = both(plain, model, batch, FREE | {"return_dict_in_generate": True})  # no row can end early
        for layer, other in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
            torch.testing.assert_close(layer.recurrent_states, other.recurrent_states)
        assert launches(graphs) >= 5
        assert not graphs.stats.slower
        before = launches(graphs)
        found, expected = both(plain, model, batch, settings | {"return_dict_in_generate": True})
        assert graphs.stats.slower[Reason.ONE_TOKEN] == 2
        assert launches(graphs) == before
        for layer, other in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
            torch.testing.assert_close(layer.recurrent_states, other.recurrent_states)


@pytest.mark.proofs
def test_launches_are_proven(pair: Any, device: torch.device) -> None:
    plain, model, graphs = pair
    for seed, lengths in enumerate(([7, 4], [5, 3, 2], [7, 4])):
        both(plain, model, tiny.prompts(lengths, device, seed), FREE)
        both(plain, model, tiny.prompts(lengths[:2], device, seed), FREE | {"do_sample": True})
    assert launches(graphs)
    proofs = {graph.proof for graph in graphs.stats.graphs.values() if "launch" in graph.inputs}
    assert proofs <= {"exact", "exact, padded", "padded"}


@pytest.mark.parametrize("number", [0, -1, 2.5, True, None, 65])
def test_a_number_of_tokens_is_a_whole_one(number: Any, llama: Any) -> None:
    with pytest.raises(sg.ConfigError, match="tokens_per_launch is"):
        graph_generation(llama, tokens_per_launch=number)


@pytest.mark.parametrize("tokens", [56, 57, 60])
def test_a_prompt_of_embeddings_counts_in_the_cache_though_not_in_the_sequence(
    tokens: int, pair: Any, device: torch.device
) -> None:
    plain, model, graphs = pair
    batch = tiny.prompts([8, 5], device)
    given = {"inputs_embeds": plain.get_input_embeddings()(batch["input_ids"]).detach()}
    given["attention_mask"] = batch["attention_mask"]
    for _ in range(2):
        expected = plain.generate(**given, **(FREE | {"max_new_tokens": tokens}))
        assert torch.equal(model.generate(**given, **(FREE | {"max_new_tokens": tokens})), expected)
    full = tokens > 57  # 8 and 56 that a step is passed are the 64 of the graphs
    assert graphs.stats.slower == ({Reason.ONE_TOKEN: 2} if full else {})
    assert bool(launches(graphs)) is not full


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_that_float32_does_not_tell_apart_are_as_likely(dtype: torch.dtype, device: torch.device) -> None:
    plain, model = (tiny.build(tiny.DECODERS["llama"], device).to(dtype) for _ in range(2))
    for one in (plain, model):
        with torch.no_grad():
            one.lm_head.weight[1::2] = one.lm_head.weight[0::2] * (1 + 1e-11)
    with graphed(model, tokens_per_launch=STEPS) as graphs:
        both(plain, model, tiny.prompts([7], device), FREE)
        assert launches(graphs)
