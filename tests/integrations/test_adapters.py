"""peft's adapters switched, scaled, merged, disabled, added and deleted under graphs: right at every call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import simplegraph as sg

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import graph_encoder, graph_generation  # noqa: E402

DORA = {"use_dora": True}


def lora(*targets: str, rank: int = 2, **more: Any) -> Any:
    return peft.LoraConfig(r=rank, target_modules=list(targets), init_lora_weights=False, **more)


def adapted(device: torch.device, **more: Any) -> Any:
    """A BERT with two adapters on different layers, `x` active."""
    base = tiny.build(lambda: transformers.BertModel(transformers.BertConfig(**tiny.BERT)), device)
    model = peft.get_peft_model(base, lora("query", "value", **more), adapter_name="x")
    model.add_adapter("y", lora("query", "key", rank=3, **more))
    return model.to(device).eval()


def assert_replays_eager(model: Any, device: torch.device, calls: int = 4) -> None:
    replays = model.graph_stats.replays
    for _ in range(calls):
        ids = torch.randint(3, tiny.VOCABULARY, (2, 7), device=device)
        found, expected = model(input_ids=ids), sg.unwrap(model)(input_ids=ids)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-4)
    assert model.graph_stats.replays > replays
    assert not model.graph_stats.failures


def scale_all(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("x", 7.0)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another": lambda model: model.set_adapter("y"),
    "both": lambda model: model.base_model.set_adapter(["x", "y"]),
    "scaled": scale_all,
    "merged": lambda model: model.merge_adapter(),
    "the other merged": lambda model: model.merge_adapter(["y"]),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "a third added and active": lambda model: (model.add_adapter("c", lora("value")), model.set_adapter("c")),
    "one deleted": lambda model: model.delete_adapter("y"),
}
UNDONE: dict[str, Callable[[Any], Any]] = {
    "another": lambda model: model.set_adapter("x"),
    "both": lambda model: model.set_adapter("x"),
    "merged": lambda model: model.unmerge_adapter(),
    "the other merged": lambda model: model.unmerge_adapter(),
    "disabled": lambda model: model.base_model.enable_adapter_layers(),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Already")
@pytest.mark.parametrize("more", [{}, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_and_its_undoing_are_followed(device: torch.device, name: str, more: dict[str, Any]) -> None:
    model = sg.wrap(adapted(device, **more), capture_sizes=[2], progress=False)
    assert_replays_eager(model, device)
    CHANGES[name](sg.unwrap(model))
    model.eval()  # a new adapter comes in training mode
    assert_replays_eager(model, device)
    UNDONE.get(name, lambda model: None)(sg.unwrap(model))
    assert_replays_eager(model, device)


@torch.inference_mode()
def test_switching_per_request_captures_each_adapter_once(device: torch.device) -> None:
    model = sg.wrap(adapted(device), capture_sizes=[2], progress=False)
    for name in "xyxy":
        model.set_adapter(name)
        assert_replays_eager(model, device)
    with model.disable_adapter():
        assert_replays_eager(model, device)
    assert_replays_eager(model, device)
    assert model.graph_stats.captures == 3
    assert model.graph_stats.recaptures == 0


@torch.inference_mode()
def test_each_row_has_the_adapter_that_its_call_names(device: torch.device) -> None:
    """Names are part of the key, and the rows of each adapter, a list of numbers, are as frozen as they are."""
    model = sg.wrap(adapted(device), capture_sizes=[2], progress=False)
    ids = torch.randint(3, tiny.VOCABULARY, (2, 7), device=device)
    answers = []
    for names in [["x", "y"], ["y", "x"], ["x", "x"]] * 4:
        expected = sg.unwrap(model)(input_ids=ids, adapter_names=names).last_hidden_state
        found = model(input_ids=ids, adapter_names=names).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        answers.append(found)
    assert not any(torch.allclose(one, other, rtol=0.1) for one, other in itertools.combinations(answers[-3:], 2))
    if device.type == "cpu":
        assert (model.graph_stats.captures, model.graph_stats.replays) == (3, 9)


@torch.inference_mode()
def test_merged_and_unloaded_is_a_plain_model(device: torch.device) -> None:
    model = sg.wrap(adapted(device).merge_and_unload(), capture_sizes=[2], progress=False)
    assert_replays_eager(model, device)


def tokens(model: Any, device: torch.device) -> torch.Tensor:
    prompt = tiny.prompts([5, 7], device)
    return model.generate(**prompt, max_new_tokens=6, do_sample=False)


def generator(device: torch.device) -> Any:
    """A Llama with two adapters that change its tokens."""
    base = tiny.build(tiny.DECODERS["llama"], device)
    model = peft.get_peft_model(base, lora("q_proj", "v_proj", lora_alpha=64), adapter_name="x")
    model.add_adapter("y", lora("q_proj", "k_proj", lora_alpha=64))
    return model.to(device).eval()


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Already")
def test_generation_follows_what_is_switched_scaled_and_merged(device: torch.device) -> None:
    model, plain = generator(device), generator(device)
    plain.load_state_dict(model.state_dict())
    steps: tuple[Callable[[Any], Any], ...] = (
        lambda model: None,
        lambda model: model.set_adapter("y"),
        lambda model: model.set_adapter("x"),
        scale_all,
        lambda model: model.merge_adapter(),
        lambda model: model.unmerge_adapter(),
    )
    seen = set()
    with graph_generation(model.get_base_model(), max_batch_size=2, max_length=64) as graphs:
        for step in steps:
            step(model)
            step(plain)
            expected, replays = tokens(plain, device), graphs.stats.replays
            for _ in range(2):
                assert tokens(model, device).equal(expected)
            assert graphs.stats.replays > replays
            seen.add(str(expected.tolist()))
    assert len(seen) > 2  # or the adapters make no difference


@torch.no_grad()
def test_an_encoder_with_adapters(device: torch.device) -> None:
    model = adapted(device)
    base = model.get_base_model()
    ids = torch.randint(3, tiny.VOCABULARY, (2, 7), device=device)
    expected = {}
    for name in "xy":
        model.set_adapter(name)
        expected[name] = base(input_ids=ids).last_hidden_state
    assert not torch.allclose(expected["x"], expected["y"], rtol=1e-2, atol=1e-2)
    with graph_encoder(base, lengths=[8], capture_sizes=[2]) as graphs:
        for name in "xxxyyyxy":
            model.set_adapter(name)
            torch.testing.assert_close(base(input_ids=ids).last_hidden_state, expected[name], rtol=1e-3, atol=1e-4)
        assert graphs.stats.replays >= 4
