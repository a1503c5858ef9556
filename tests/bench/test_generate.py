"""``python -m bench.generate``: text from a checkpoint is transformers' own; what does not fit is said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from bench import generate  # noqa: E402
from bench.tools.text import TEXT  # noqa: E402

VOCAB = 320


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    settings = transformers.Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        eos_token_id=VOCAB - 1,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(settings).save_pretrained(tmp_path)
    return tmp_path


def test_generation_from_a_checkpoint_is_that_of_transformers(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--model", str(checkpoint), "--prompt", "5, 17 3", "9", "--max-tokens", "12"]) == 0
    printed = capsys.readouterr().out.splitlines()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    for line, prompt in zip(printed, ([5, 17, 3], [9]), strict=True):
        expected: Any = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
        assert [int(word) for word in line.split()] == expected[0, len(prompt) :].tolist()


def test_a_tokenizer_is_used_where_there_is_one(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pieces = tokenizers.ByteLevelBPETokenizer()
    pieces.train(str(TEXT), vocab_size=VOCAB)
    pieces.save_model(str(checkpoint))
    tokenizer = transformers.Qwen2Tokenizer(str(checkpoint / "vocab.json"), str(checkpoint / "merges.txt"))
    tokenizer.save_pretrained(checkpoint)
    prompt = "When in the course of human events"
    assert generate.main(["--model", str(checkpoint), "--prompt", prompt, "--max-tokens", "6"]) == 0
    printed = capsys.readouterr().out[:-1]
    ids = transformers.AutoTokenizer.from_pretrained(checkpoint).encode(prompt)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    expected: Any = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    assert printed == tokenizer.decode(expected[0, len(ids) :])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "tiny", "--prompt", "hello"], "has no tokenizer"),
        (["--model", "tiny", "--prompt", "1", ""], "the prompt is empty"),
        (["--model", "tiny", "--prompt", "512"], "token id 512; expected 0 to 511"),
        (["--model", "tiny", "--prompt", "1", "--top-p", "2"], "top_p is 2.0"),
    ],
)
def test_what_cannot_be_generated_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(arguments) == 1
    assert words in capsys.readouterr().err


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.GPT2Config(n_layer=1).save_pretrained(tmp_path)
    assert generate.main(["--model", str(tmp_path), "--prompt", "1"]) == 1
    assert "model_type is 'gpt2'" in capsys.readouterr().err
