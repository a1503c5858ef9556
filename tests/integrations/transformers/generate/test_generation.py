"""Graphs are given to a model and taken back; generations before, beside and after are right."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
import tiny_states  # noqa: E402
from tiny_generation import CACHE, GREEDY, MODELS, TOKENS, graphed  # noqa: E402

from simplegraph.integrations.transformers import graph_generation  # noqa: E402


@pytest.mark.proofs
@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "qwen3_moe"])
def test_padded_batches_are_proven_though_padding_rows_are_written_to_the_cache(
    name: str, device: torch.device
) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    with graphed(model) as graphs:
        steps = 0
        for seed, lengths in enumerate(([7, 4, 6], [5, 3, 2, 9], [5, 3, 2])):
            batch = tiny.prompts(lengths, device, seed)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
            steps += TOKENS - 1
        assert set(graphs.stats.eager) == {Reason.FIRST_CALL, Reason.PROOF}
        assert graphs.stats.replays == steps - sum(graphs.stats.eager.values())
        assert graphs.stats.padded_tokens > TOKENS


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
        step = {"input_ids": ids[:, -1:], CACHE: found[CACHE]}
        assert llama(**step)[CACHE].get_seq_length() == 7


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


def test_a_second_call_takes_the_place_of_the_first_and_says_so(
    llama: Any, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    first = graphed(llama)
    assert not caplog.messages
    second = graphed(llama, max_batch_size=2)
    assert len(caplog.messages) == 1
    assert "this LlamaForCausalLM had graphs already" in caplog.text
    assert "remove()" in caplog.text
    assert "replaced by later graphs" in str(first.report())
    assert "replaced" not in str(second.report())
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
    with pytest.raises(sg.ConfigError, match="that has graphs itself"):
        graph_generation(sg.wrap(llama))
    for size in (0, -1, 2.5, True):
        with pytest.raises(sg.ConfigError, match="max_length is"):
            graph_generation(llama, max_length=size)  # type: ignore[arg-type]
    assert type(llama) is transformers.LlamaForCausalLM


def test_a_call_that_is_refused_leaves_the_graphs_of_the_earlier_one(llama: Any, device: torch.device) -> None:
    with graphed(llama) as graphs:
        with pytest.raises(sg.ConfigError, match="capture_sizes"):
            graph_generation(llama, capture_sizes=[0])
        llama.generate(**tiny.prompts([6], device), **GREEDY)
        assert graphs.stats.replays == TOKENS - 2


def test_a_report_names_the_model_and_its_device_before_anything_ran(llama: Any, device: torch.device) -> None:
    found = graphed(llama).report().to_dict()
    assert (found["name"], found["device"].split(":")[0]) == ("LlamaForCausalLM", device.type)


def test_a_model_that_is_dropped_with_its_graphs_is_freed(device: torch.device) -> None:
    model = tiny.build(tiny.DECODERS["llama"], device)
    graphs = graphed(model)
    for _ in range(2):
        model.generate(**tiny.prompts([6, 4], device), **GREEDY)
    assert graphs.stats.captures > 0
    gone = weakref.ref(model)
    del model, graphs
    for _ in range(2):  # the collector does not look into storages of the emulator, which hold some
        gc.collect()
    assert gone() is None, "its weights would stay on the GPU"


@pytest.mark.proofs
@pytest.mark.parametrize("tokens_per_launch", [1, 4])
@pytest.mark.parametrize("name", ["llama", "Mamba2"])
def test_after_capture_varied_generations_replay_all_steps_but_the_proofs(
    name: str, tokens_per_launch: int, device: torch.device
) -> None:
    """The first request of each size and length waited for its capture."""
    plain, model = (tiny.build((MODELS | tiny_states.MODELS)[name], device) for _ in range(2))
    with graphed(model, max_length=128, tokens_per_launch=tokens_per_launch) as graphs:
        summary = graphs.capture(sizes=[2, 4], lengths=[1, 100])
        assert summary.captured >= 2
        assert not summary.failed
        captured, before = graphs.stats.captures, graphs.stats.eager.copy()
        for seed, lengths in enumerate(([7, 4, 6], [60, 33, 70], [5, 3, 2, 9], [64], [90])):
            batch = tiny.prompts(lengths, device, seed)
            assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.captures == captured, graphs.report()
        assert set(graphs.stats.eager - before) <= {Reason.PROOF}
        assert graphs.stats.replays > TOKENS


def test_a_model_that_was_never_wrapped_is_its_own_unwrapped_one(llama: Any) -> None:
    with graphed(llama):
        assert sg.unwrap(llama) is llama
        wrapped: Any = sg.wrap(llama)
        assert sg.unwrap(wrapped) is llama
        assert type(wrapped).generate is transformers.LlamaForCausalLM.generate  # graphs of `generate` are the model's


def test_remove_keeps_a_class_that_another_library_derived_meanwhile(
    llama: Any, plain: Any, device: torch.device
) -> None:
    batch = tiny.prompts([6, 4], device)
    with graphed(llama) as graphs:
        before = type(llama)
        derived = type("Adapted", (before,), {"adapted": True})
        llama.__class__ = derived
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays
    assert type(llama) is derived
    calls = graphs.stats.replays, graphs.stats.eager.total()
    assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
    llama.__class__ = before  # what that library found, and puts back
    assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
    assert (graphs.stats.replays, graphs.stats.eager.total()) == calls
    assert type(copy.deepcopy(llama)) is transformers.LlamaForCausalLM
    with graphed(llama) as again:
        assert torch.equal(llama.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert again.stats.replays


@pytest.mark.parametrize(("name", "advised"), [("llama", True), ("t5", False)])
def test_a_report_advises_a_method_that_its_handle_has(name: str, advised: bool, device: torch.device) -> None:
    """`capture_graphs` is a method of wrapped modules; `capture` refuses models with an encoder."""
    model = tiny.build(MODELS[name], device)
    with graphed(model) as graphs:
        model.generate(**tiny.prompts([6, 4], device), **GREEDY)
        assert graphs.stats.longest_stall
        said = str(graphs.report())
    assert ("; capture does that before the first call" in said) is advised
    assert "capture_graphs" not in said


def test_a_call_that_was_to_be_captured_upfront_is_told_which_method_captures(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_CAPTURE", "upfront")
    model = tiny.build(MODELS["llama"], device)
    batch = tiny.prompts([6, 4], device)
    with graphed(model, capture_sizes=[2]) as graphs:
        model.generate(**batch, **GREEDY)
        said = str(graphs.report())
        assert "use capture)" in said
        assert "capture_graphs" not in said
        graphs.capture(lengths=[1, 30])
        model.generate(**batch, **GREEDY)
        assert graphs.stats.replays


def test_capture_says_that_graphs_are_switched_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build(MODELS["llama"], device)
    with graphed(model) as graphs:
        with sg.eager():
            model.generate(**tiny.prompts([3], device), **GREEDY)
        assert not graphs.capture(sizes=[2]).switched_off
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "off")
    with graphed(tiny.build(MODELS["llama"], device)) as graphs:
        assert str(graphs.capture(sizes=[2])).endswith(": graphs are switched off")


def test_captures_after_weights_moved_keep_the_counters_and_the_graphs(device: torch.device) -> None:
    model = tiny.build(MODELS["llama"], device)
    with graphed(model) as graphs:
        for replays in range(5):  # as often as an RL loop may
            weight = model.lm_head.weight
            model.lm_head.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
            assert graphs.capture(sizes=[2]).captured >= 1
            before = graphs.stats.replays
            model.generate(**tiny.prompts([3, 4], device, replays), **GREEDY)
            assert graphs.stats.replays > before


def test_capture_refuses_lengths_above_the_largest_and_models_that_read_no_tokens(device: torch.device) -> None:
    model = tiny.build(MODELS["llama"], device)
    with graphed(model) as graphs, pytest.raises(sg.ConfigError, match=r"lengths is \[1000000\], but max_length is"):
        graphs.capture(lengths=[1_000_000])
    with graphed(tiny.build(MODELS["t5"], device)) as graphs, pytest.raises(sg.ConfigError, match="call generate with"):
        graphs.capture()
