"""The serving benchmark and offline generation: what is asked for is served, and the figures are what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from bench import generate  # noqa: E402
from bench.engine import Engine, EngineConfig  # noqa: E402
from bench.engine.request import Request, SamplingParams  # noqa: E402
from bench.models.workload import Workload  # noqa: E402
from bench.serve import __main__ as serve  # noqa: E402
from bench.serve import load  # noqa: E402
from bench.tools.text import TEXT  # noqa: E402

VOCAB = 320


def test_requests_come_at_the_rate_asked_for_with_lengths_of_the_table() -> None:
    arrivals = load.load(2000, 50.0, 512)
    assert arrivals[0].at == 0
    assert 1999 / arrivals[-1].at == pytest.approx(50, rel=0.1)
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    assert {(len(one.prompt), one.max_tokens) for one in arrivals} >= {(501, 655), (655, 118)}
    assert load.load(5, 50.0, 512) == load.load(5, 50.0, 512)
    assert load.load(5, 50.0, 512, seed=1) != load.load(5, 50.0, 512)


def test_all_requests_can_come_at_once_and_long_ones_be_cut() -> None:
    arrivals = load.load(50, math.inf, 512, longest=64)
    assert {one.at for one in arrivals} == {0.0}
    assert max(len(one.prompt) + one.max_tokens for one in arrivals) <= 64


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="the rate is"):
        load.load(3, rate, 512)


def test_the_figures_are_those_of_the_tokens() -> None:
    timings = [load.Timing(0.0, [0.1, 0.2, 0.4]), load.Timing(1.0, [1.5])]
    requests = [_request(3, 3), _request(2, 1)]
    figures = load.summary(timings, requests)
    assert figures["dropped"] == 1
    assert figures["tokens_per_second"] == pytest.approx(4 / 1.5)
    assert figures["ttft_mean_ms"] == pytest.approx(300)
    assert figures["itl_median_ms"] == pytest.approx(150)
    assert figures["itl_p99_ms"] == pytest.approx(200)
    assert figures["tpot_mean_ms"] == pytest.approx(150)


def _request(asked: int, got: int) -> Request:
    return Request(0, [1], SamplingParams(max_tokens=asked), output=[0] * got)


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert load.quantile(values, 0.99) == 99
    assert load.quantile(values, 0.5) == 50
    assert load.quantile([7.0], 0.99) == 7


def test_every_request_of_a_load_gets_its_tokens() -> None:
    llama = Workload("tiny", (1,), torch.device("cpu"), lm_head=True).build()
    engine = Engine(llama, EngineConfig(mode="NONE", max_num_seqs=3, max_model_len=64, num_pages=20))
    arrivals = load.load(8, 500.0, 512, longest=40)
    timings, requests = load.serve(engine, arrivals)
    assert [len(request.output) for request in requests] == [one.max_tokens for one in arrivals]
    assert [len(timing.tokens) for timing in timings] == [one.max_tokens for one in arrivals]
    assert all(timing.ttft > 0 for timing in timings)
    assert load.summary(timings, requests)["dropped"] == 0


def test_the_serving_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.json"
    assert (
        serve.main(["--requests", "3", "--rate", "100", "--arms", "eager,full-decode-only", "--json", str(path)]) == 0
    )
    printed = capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert list(saved["results"]) == ["eager", "full-decode-only"]
    assert "ITL mean" in printed
    if not torch.cuda.is_available():
        assert "NOT speed" in printed
    with pytest.raises(SystemExit):
        serve.main(["--arms", "none"])


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
        (["--model", "no-such", "--prompt", "1"], "no-such"),
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
