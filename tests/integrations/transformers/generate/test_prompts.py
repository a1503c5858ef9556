"""Prefills of short prompts are replayed, padded on the right; whatever else comes runs by the model's own forward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from tiny_generation import CACHE, MODELS, graphed  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

import simplegraph as sg  # noqa: E402
from simplegraph import Reason  # noqa: E402
from simplegraph.integrations.transformers import GraphedGeneration, graph_generation  # noqa: E402
from simplegraph.integrations.transformers.generate import prompt as prompt_module  # noqa: E402

SETTINGS: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
ONE: dict[str, Any] = SETTINGS | {"max_new_tokens": 1, "min_new_tokens": 1}
WHOLE: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
pytestmark = pytest.mark.proofs
ON_THE_WAY = {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF, Reason.OUTPUT_SHAPE_UNKNOWN}


def prompt(rows: int, tokens: int, device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny.VOCABULARY, (rows, tokens), generator=generator).to(device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def replays(graphs: GraphedGeneration) -> int:
    """Prefills that were replays."""
    return int(graphs._prompts.step.graph_stats.replays)


def check(model: Any, plain: Any, given: dict[str, Any], **settings: Any) -> None:
    """Compare a generation's tokens, logits and cache with those of the plain model."""
    found, expected = (one.generate(**given, **SETTINGS, **WHOLE, **settings) for one in (model, plain))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits)
    for layer, wanted in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close((layer.keys, layer.values), (wanted.keys, wanted.values))


def until_replayed(model: Any, plain: Any, graphs: GraphedGeneration, device: torch.device, *shape: int) -> None:
    """Generate until a prefill of this shape is a replay."""
    before = replays(graphs)
    for seed in range(8):
        check(model, plain, prompt(*shape, device, seed))
        if replays(graphs) > before:
            return
    pytest.fail(f"no prefill of {shape} was replayed: {graphs.report()}")


@pytest.mark.parametrize("name", tiny.DECODERS)
def test_prefills_of_all_lengths_and_rows_are_those_of_the_plain_model(name: str, device: torch.device) -> None:
    """Layers with a window keep its tokens alone; prompts are shorter and longer than that."""
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    with graphed(model, max_length=128) as graphs:
        for length in (5, 13, 64, 70):
            until_replayed(model, plain, graphs, device, 1, length)
        for length in (5, 20):
            until_replayed(model, plain, graphs, device, 3, length)
        before = replays(graphs)
        for seed, shape in enumerate([(1, 2), (1, 6), (1, 63), (1, 80), (3, 7), (4, 30), (1, 13)]):
            check(model, plain, prompt(*shape, device, 20 + seed))
        assert replays(graphs) >= before + 5
        assert set(graphs._prompts.step.graph_stats.eager) <= ON_THE_WAY
        assert f"prompts in graphs: {graphs._prompts.step.graph_stats.summary}" in graphs.report().optimizations


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_experts_whose_tokens_are_counted_in_python_run_eagerly(name: str, device: torch.device) -> None:
    """On a GPU in float32; elsewhere such models have graphs for prompts, too."""
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    with graphed(model, max_length=128) as graphs:
        for seed, tokens in enumerate([5, 13, 20] * 4):
            check(model, plain, prompt(1, tokens, device, seed))
        assert bool(replays(graphs)) != bool(graphs._prompts.refusal)


def test_prefills_that_no_graph_serves_are_those_of_the_plain_model(
    llama: Any, plain: Any, device: torch.device
) -> None:
    with graphed(llama, max_length=400) as graphs:
        until_replayed(llama, plain, graphs, device, 1, 9)
        before = replays(graphs)
        check(llama, plain, tiny.prompts([7, 4, 6], device))  # padded on the left
        check(llama, plain, prompt(1, 257, device))
        check(llama, plain, prompt(3, 65, device))
        check(llama, plain, prompt(1, 1, device))
        embeds = plain.get_input_embeddings()(prompt(1, 9, device)["input_ids"])
        check(llama, plain, {"inputs_embeds": embeds, "attention_mask": torch.ones(1, 9, device=device)})
        for one in (llama, plain):
            cache = DynamicCache(config=one.config)
            first = prompt(1, 9, device)
            with torch.no_grad():
                one(input_ids=first["input_ids"][:, :5], use_cache=True, **{CACHE: cache})
            first[CACHE] = cache
            result = one.generate(**first, **SETTINGS)
            assert torch.equal(result, plain.generate(**prompt(1, 9, device), **SETTINGS))
        assert replays(graphs) == before


def test_a_prefill_in_chunks(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        for seed in range(6):
            check(llama, plain, prompt(1, 9, device, seed), prefill_chunk_size=4)
        assert replays(graphs), "first chunks, onto which the model writes the others"


def test_positions_of_the_callers_own(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        for seed in range(8):
            given = prompt(1, 9, device, seed)
            check(llama, plain, given | {"position_ids": torch.arange(seed, seed + 9, device=device)[None]})
        assert replays(graphs)


def test_a_change_of_the_model_after_which_padding_matters(llama: Any, plain: Any, device: torch.device) -> None:
    """As steering does, which adds a vector to the last token."""

    def steered(call: Any, *args: Any) -> Any:
        hidden = call(*args).clone()
        hidden[:, -1] += 3
        return hidden

    with graphed(llama) as graphs:
        until_replayed(llama, plain, graphs, device, 1, 9)
        for one in (llama, plain):
            mlp = one.model.layers[0].mlp
            mlp.forward = functools.partial(steered, mlp.forward)
        for seed in range(8):
            check(llama, plain, prompt(1, 9, device, seed))
        assert "padded to 64 tokens, " in graphs._prompts.refusal


class Own(transformers.LlamaForCausalLM):
    """A user's model: what it does otherwise is in `prepare`, before its forward, and in `finish`, after it."""

    def forward(
        self, input_ids: Any = None, *, position_ids: Any = None, logits_to_keep: Any = 0, **kwargs: Any
    ) -> Any:
        given = {"input_ids": input_ids, "position_ids": position_ids, "logits_to_keep": logits_to_keep}
        outputs = super().forward(**self.prepare(given | kwargs))
        self.finish(outputs, input_ids.shape[1])
        return outputs

    def prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        return given

    def finish(self, outputs: Any, tokens: int) -> None: ...


def twins(kind: type[Own], device: torch.device) -> tuple[Any, Any]:
    """The same model twice."""
    config = transformers.LlamaConfig(**tiny.LLAMA)
    first, second = (tiny.build(lambda: kind(config), device) for _ in range(2))
    return first, second


class Whole(Own):
    """Every token knows the others, the later ones too."""

    def prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        embeds = self.get_input_embeddings()(given["input_ids"])
        return given | {"input_ids": None, "inputs_embeds": embeds + embeds.mean(1, keepdim=True)}


class Branches(Own):
    """Does otherwise with more than 32 tokens."""

    def finish(self, outputs: Any, tokens: int) -> None:
        outputs.logits = outputs.logits * (2 if tokens > 32 else 1)


@pytest.mark.parametrize(("kind", "lengths"), [(Whole, [64, 9]), (Whole, [9, 10, 11]), (Branches, [40, 9])])
def test_a_model_to_which_padding_matters_runs_eagerly(kind: Any, lengths: list[int], device: torch.device) -> None:
    """Where the first prompts are as long as padded ones, their replays are right, and those of others are not."""
    plain, model = twins(kind, device)
    with graphed(model, max_length=128) as graphs:
        for seed in range(9):
            check(model, plain, prompt(1, lengths[0] if seed < 6 else lengths[seed % len(lengths)], device, seed))
        assert "no graphs for prompts: padded to 64 tokens, output 0 differs by" in str(graphs.report())


class Counts(Own):
    """Keeps what it has seen: numbers of tokens in a list, and those of each token in a buffer if `fills`."""

    fills = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lengths: list[int] = []
        self.register_buffer("counts", torch.zeros(tiny.VOCABULARY), persistent=False)

    def prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = given["input_ids"].flatten()
        self.lengths.append(len(ids))
        if self.fills:
            self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
        return given


@pytest.mark.parametrize("fills", [False, True])
def test_what_a_forward_keeps_is_that_of_its_own_prefills(fills: bool, device: torch.device) -> None:
    plain, model = twins(Counts, device)
    plain.fills = model.fills = fills
    with graphed(model) as graphs:
        for seed in range(8):
            given = prompt(1, 9, device, seed) | ONE
            assert torch.equal(*(one.generate(**given) for one in (model, plain)))
            assert model.lengths == plain.lengths
            assert torch.equal(model.counts, plain.counts)
        assert not replays(graphs)
        assert graphs._prompts.refusal


class Draws(Own):
    """Draws a number for each token of a prompt."""

    def prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        ids = given["input_ids"]
        if ids.shape[1] > 1:
            torch.rand(ids.shape, device=ids.device)
        return given


def test_a_prefill_that_draws_runs_eagerly(device: torch.device) -> None:
    plain, model = twins(Draws, device)
    with graphed(model) as graphs:
        for seed in range(6):
            drawn = []
            for one in (model, plain):
                torch.manual_seed(seed)
                tokens = one.generate(**prompt(1, 9, device, seed), **SETTINGS | {"do_sample": True})
                drawn.append((tokens.tolist(), torch.rand(3, device=device).tolist()))
            assert drawn[0] == drawn[1]
        assert not replays(graphs)


class Tallies(Own):
    """Counts its runs in a buffer or a list, draws a number at each, and may compute with both."""

    where, draws, shows = "buffer", False, False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("counts", torch.zeros(4), persistent=False)
        self.held = [torch.zeros(4)]

    def prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        self.counts += self.where == "buffer"
        self.held[0] += self.where == "list"
        return given

    def finish(self, outputs: Any, tokens: int) -> None:
        scale = 1 + self.counts[0] / 10
        if self.draws:
            scale = scale + torch.rand((), device=scale.device)
        if self.shows:
            outputs.logits = outputs.logits * scale


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize(("where", "draws"), [("buffer", False), ("buffer", True), ("list", False), ("none", True)])
def test_each_token_is_counted_and_drawn_for_once(where: str, draws: bool, shows: bool, device: torch.device) -> None:
    plain, model = twins(Tallies, device)
    for one in (plain, model):
        one.where, one.draws, one.shows = where, draws, shows
        one.held = [one.held[0].to(device)]
    with graphed(model, max_length=128) as graphs:
        for seed in range(5):
            found = []
            for one in (model, plain):
                torch.manual_seed(seed)
                tokens = one.generate(**prompt(1, 9, device, seed), **SETTINGS | {"do_sample": True}).tolist()
                found.append([tokens, *(it.tolist() for it in (torch.rand(2, device=device), one.counts, one.held[0]))])
            assert found[0] == found[1]
        assert not replays(graphs)
        assert graphs.stats.replays > 5
        assert Reason.GENERATION not in graphs.stats.eager  # a step from the same start equals the model's own


def test_while_graphs_are_off_prefills_are_the_models_own(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        until_replayed(llama, plain, graphs, device, 1, 9)
        stats = graphs._prompts.step.graph_stats
        before = stats.replays, stats.eager.copy()
        with sg.eager():
            check(llama, plain, prompt(1, 9, device, 30))
            check(llama, plain, prompt(1, 11, device, 30))
        assert (stats.replays, stats.eager) == before
        check(llama, plain, prompt(1, 9, device, 31))
        assert replays(graphs) == before[0] + 1


def test_a_window_that_is_set_anew_is_seen(device: torch.device) -> None:
    plain, model = (tiny.build(MODELS["mistral"], device) for _ in range(2))
    with graphed(model) as graphs:
        until_replayed(model, plain, graphs, device, 1, 20)
        for one in (model, plain):
            one.config.sliding_window = 4
        until_replayed(model, plain, graphs, device, 1, 20)


def test_an_interrupted_comparison_is_made_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = twins(Whole, device)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with graphed(model) as graphs:
        with monkeypatch.context() as patched:
            patched.setattr(prompt_module, "first_difference", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model.generate(**prompt(1, 9, device), **SETTINGS)
        for seed in range(6):
            check(model, plain, prompt(1, 9, device, seed))
        assert not replays(graphs)


class Tells(Own):
    """Returns more than logits and a cache."""

    def finish(self, outputs: Any, tokens: int) -> None:
        outputs["loss"] = outputs.logits.sum()


class Number(Own):
    """Takes a number of logits, and no places."""

    def prepare(self, given: dict[str, Any]) -> dict[str, Any]:
        return given | {"logits_to_keep": int(f"{given['logits_to_keep']}")}


@pytest.mark.parametrize(("kind", "why"), [(Tells, "padded to 64 tokens, "), (Number, "ValueError: invalid literal")])
def test_a_model_that_takes_or_returns_something_else_runs_eagerly(kind: Any, why: str, device: torch.device) -> None:
    plain, model = twins(kind, device)
    with graphed(model) as graphs:
        for seed in range(6):
            check(model, plain, prompt(1, 9, device, seed))
        assert not replays(graphs)
        assert f"no graphs for prompts: {why}" in str(graphs.report())


def test_weights_that_change_are_seen(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        until_replayed(llama, plain, graphs, device, 1, 9)
        for one in (llama, plain):
            with torch.no_grad():
                one.lm_head.weight.mul_(-1)  # in place
        check(llama, plain, prompt(1, 9, device, 40))
        for one in (llama, plain):
            torch.manual_seed(3)
            weight = torch.randn_like(one.model.layers[0].mlp.up_proj.weight)
            one.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        until_replayed(llama, plain, graphs, device, 1, 9)


def test_a_kept_cache_is_the_callers_own(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        until_replayed(llama, plain, graphs, device, 1, 9)
        found, expected = (one.generate(**prompt(1, 9, device), **ONE, **WHOLE) for one in (llama, plain))
        check(llama, plain, prompt(1, 9, device, 5))  # a replay, which overwrites what the last one wrote
        for layer, wanted in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
            torch.testing.assert_close((layer.keys, layer.values), (wanted.keys, wanted.values))
        torch.testing.assert_close(found.logits, expected.logits)


def test_capture_leaves_prompts_to_be_captured_as_they_come(device: torch.device) -> None:
    """It runs none that is longer than it was told: this model has 64 positions."""
    config = transformers.GPT2Config(**(tiny.GPT2 | {"n_positions": 64}))
    plain, model = (tiny.build(lambda: transformers.GPT2LMHeadModel(config), device) for _ in range(2))
    with graph_generation(model, max_batch_size=2, max_length=512) as graphs:
        graphs.capture(sizes=[1, 2, 16], lengths=[1, 60])
        assert not graphs._prompts.step.graph_stats.captures
        for shape in ((1, 9), (2, 33), (16, 5)):
            for seed in range(5):
                check(model, plain, prompt(*shape, device, seed))
        assert replays(graphs) >= 2
        assert graphs._prompts.refusal is None


def test_inference_mode_comes_and_goes(llama: Any, plain: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        for seed in range(12):
            with torch.inference_mode(seed % 3 == 0):
                check(llama, plain, prompt(1 + seed % 2, 9, device, seed))
        assert replays(graphs)


def test_reset_and_remove_drop_the_graphs_of_prompts(llama: Any, plain: Any, device: torch.device) -> None:
    graphs = graphed(llama)
    until_replayed(llama, plain, graphs, device, 1, 9)
    graphs.reset()
    assert not graphs._prompts.step.graph_stats.graphs
    until_replayed(llama, plain, graphs, device, 1, 9)
    graphs.remove()
    assert not graphs._prompts.step.graph_stats.graphs
    check(llama, plain, prompt(1, 9, device))


def test_sampling_beams_and_launches_go_on_from_replayed_prefills(llama: Any, plain: Any, device: torch.device) -> None:
    ways: list[dict[str, Any]] = [{"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"num_return_sequences": 2}]
    ways[2] |= {"do_sample": True}
    with graph_generation(llama, max_batch_size=4, max_length=64, tokens_per_launch=2) as graphs:
        for seed in range(8):
            for way in ways:
                results = []
                for one in (llama, plain):
                    torch.manual_seed(seed)
                    given = prompt(1, 9, device, seed)
                    results.append(one.generate(**given, **(SETTINGS | {"max_new_tokens": 9} | way)))
                assert torch.equal(*results), way
        assert replays(graphs)
