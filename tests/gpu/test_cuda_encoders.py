"""Encoders of transformers on a GPU: DeBERTa with its scripted functions, and full lengths without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simplegraph import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

from simplegraph.integrations.transformers import graph_encoder  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]


def tokens(rows: int, length: int, device: torch.device, *, hide: bool) -> dict[str, torch.Tensor]:
    mask = torch.ones(rows, length, dtype=torch.long, device=device)
    mask[-1, (length + 1) // 2 :] = 0 if hide else 1
    return {"input_ids": torch.randint(3, tiny.VOCABULARY, (rows, length), device=device), "attention_mask": mask}


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


def test_full_lengths_take_eagers_attention_kernels(device: torch.device) -> None:
    """A mask made in the capture would choose other, slower ones."""

    def kernels(call: Any) -> set[str]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        return {event.key for event in profile.key_averages() if "attention" in event.key or "fmha" in event.key}

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
        assert kernels(lambda: model(**inputs)) == kernels(lambda: plain(**inputs))
        hidden = tokens(4, 64, device, hide=True)
        for _ in range(4):
            shown = hidden["attention_mask"].bool()
            found, expected = (one(**hidden).last_hidden_state[shown] for one in (model, plain))
            torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
