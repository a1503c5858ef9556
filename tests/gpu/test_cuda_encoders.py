"""Encoders of transformers on a GPU: DeBERTa with its scripted functions, and full lengths without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import graph_encoder  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]


def tokens(rows: int, length: int, device: torch.device, *, hide: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long, device=device)
    mask[-1, (length + 1) // 2 :] = 0 if hide else 1
    return {"input_ids": torch.randint(3, tiny.VOCABULARY, (rows, length), device=device), "attention_mask": mask}


def kernels(call: Any) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    named = ("attention", "fmha", "flash", "sdpa")
    return {event.key for event in profile.key_averages() if any(name in event.key.lower() for name in named)}


def test_deberta_is_served_at_lengths_between_captured_ones(device: torch.device) -> None:
    settings = {"position_buckets": 8, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    config = transformers.DebertaV2Config(**tiny.BERT, **settings, type_vocab_size=0, position_biased_input=False)
    plain, model = (tiny.build(lambda: transformers.DebertaV2Model(config), device) for _ in range(2))
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[4]) as graphs:
        for length in (10, 12, 9, 16, 16, 20, 30, 25, 31, 12):
            inputs = tokens(4, length, device, hide=True)
            shown = inputs["attention_mask"].bool()
            found, expected = (one(**inputs).last_hidden_state[shown] for one in (model, plain))
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
        assert not graphs.stats.failures
        assert Reason.LENGTH_PADDING not in graphs.stats.eager
        assert graphs.stats.replays >= 3


def test_lengths_that_cannot_be_padded_get_graphs_of_their_own(device: torch.device) -> None:
    config = transformers.ConvBertConfig(**tiny.BERT, embedding_size=64)
    plain, model = (tiny.build(lambda: transformers.ConvBertModel(config), device) for _ in range(2))
    with graph_encoder(model, lengths=[16, 32], capture_sizes=[4]) as graphs:
        for turn in range(6):
            for length in (10, 12, 27):
                inputs = tokens(4, length, device, hide=bool(turn % 2))
                found, expected = (one(**inputs).last_hidden_state for one in (model, plain))
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert not graphs.stats.failures
        assert graphs.stats.eager[Reason.LENGTH_PADDING] == 3
        assert graphs.stats.replays >= 4, graphs.report()


def test_full_lengths_take_eagers_attention_kernels(device: torch.device) -> None:
    """A mask made in the capture would choose other, slower ones."""

    half = {"hidden_size": 128, "num_attention_heads": 2}
    config = transformers.BertConfig(**(tiny.BERT | half))
    plain, model = (
        tiny.build(lambda: transformers.BertModel(config), device).to(torch.bfloat16).eval() for _ in range(2)
    )
    model.load_state_dict(plain.state_dict())
    inputs = tokens(4, 64, device, hide=False)
    with graph_encoder(model, lengths=[64], capture_sizes=[4]) as graphs:
        for _ in range(5):
            found, expected = (one(**inputs).last_hidden_state for one in (model, plain))
            assert torch.equal(found, expected)
        assert graphs.stats.replays >= 1
        expected = kernels(lambda: plain(**inputs))
        assert expected
        assert kernels(lambda: model(**inputs)) == expected
        hidden = tokens(4, 64, device, hide=True)
        for _ in range(4):
            shown = hidden["attention_mask"].bool()
            found, expected = (one(**hidden).last_hidden_state[shown] for one in (model, plain))
            torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_without_a_mask_replays_take_eagers_attention_kernels(device: torch.device, kind: str, mode: Any) -> None:
    """Equal to the bit, as only the same kernels are in half precision."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": tiny.VOCABULARY}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    cell: Any = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=2)),
        "gpt2": lambda: transformers.GPT2Model(
            transformers.GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=tiny.VOCABULARY, use_cache=False)
        ),
        "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**sizes, **heads, use_cache=False)),
    }[kind]
    plain = tiny.build(cell, device).to(torch.bfloat16).eval()
    model = sg.wrap(plain, capture_sizes=[1, 2, 4], progress=False)
    with mode():
        model.capture_graphs(torch.randint(3, tiny.VOCABULARY, (4, 64), device=device))
        for rows in (4, 2, 1) * 3:
            tokens = torch.randint(3, tiny.VOCABULARY, (rows, 64), device=device)
            assert torch.equal(model(tokens).last_hidden_state, plain(tokens).last_hidden_state)
        assert not model.graph_stats.failures
        assert model.graph_stats.replays >= 6, model.graph_report()
        assert kernels(lambda: model(tokens)) == kernels(lambda: plain(tokens))
