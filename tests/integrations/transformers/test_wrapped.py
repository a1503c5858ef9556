"""Models of transformers, from a config with random weights, run through graphs as they are."""

from __future__ import annotations

import pytest
import torch

import simplegraph as sg

transformers = pytest.importorskip("transformers")

SIZES, TOKENS, VOCABULARY = [1, 2, 4, 8], 12, 100
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}


def bert(device: torch.device) -> torch.nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=VOCABULARY
    )
    return transformers.BertModel(config).to(device).eval()


def gpt2(device: torch.device) -> torch.nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, **SMALL)
    return transformers.GPT2LMHeadModel(config).to(device).eval()


def ids(rows: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, TOKENS), device=device)


def test_an_encoder_with_a_padding_mask_is_captured_and_as_in_eager(device: torch.device) -> None:
    module = bert(device)
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    with torch.inference_mode():
        for rows in (4, 3, 1, 8, 5) * 3:
            mask = torch.ones(rows, TOKENS, dtype=torch.long, device=device)
            mask[-1, TOKENS // 2 :] = 0
            batch = {"input_ids": ids(rows, device), "attention_mask": mask}
            found, expected = model(**batch), module(**batch)
            assert type(found) is type(expected)
            torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-3, atol=1e-3)
    assert model.graph_stats.replays >= 9
    assert not model.graph_stats.failures


def test_a_decoder_without_its_cache_is_captured_and_as_in_eager(device: torch.device) -> None:
    module = gpt2(device)
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    with torch.inference_mode():
        for rows in (4, 3, 1) * 3:
            tokens = ids(rows, device)
            found, expected = model(tokens, use_cache=False), module(tokens, use_cache=False)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-3, atol=1e-3)
    assert model.graph_stats.replays >= 5
    assert not model.graph_stats.failures


def test_a_cache_object_in_the_output_runs_eagerly_and_says_so(device: torch.device) -> None:
    module = gpt2(device)
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    with torch.inference_mode():
        tokens = ids(2, device)
        expected = module.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=1)
        assert torch.equal(model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=1), expected)
        for _ in range(3):
            model(tokens)
    assert model.graph_stats.replays == 0
    assert model.graph_stats.eager[sg.Reason.UNSUPPORTED_OUTPUT] >= 2


class Embedder(torch.nn.Module):
    """Takes a tokenizer's result as it is, as sentence encoders do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.bert = bert(device)

    def forward(self, batch):
        hidden = self.bert(**batch).last_hidden_state
        return transformers.BatchEncoding({"mean": hidden.mean(1)})


def test_a_tokenizers_result_is_an_argument_and_an_output_as_it_comes(device: torch.device) -> None:
    module = Embedder(device).eval()
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    with torch.inference_mode():
        for rows in (4, 2, 3, 4, 3):
            tokens = {"input_ids": ids(rows, device), "attention_mask": torch.ones(rows, TOKENS, device=device)}
            batch = transformers.BatchEncoding(tokens, [object() for _ in range(rows)], n_sequences=1)
            found, expected = model(batch), module(batch)
            assert type(found) is transformers.BatchEncoding
            torch.testing.assert_close(found["mean"], expected["mean"], rtol=1e-3, atol=1e-3)
    assert model.graph_stats.replays >= 1
    assert not model.graph_stats.failures
