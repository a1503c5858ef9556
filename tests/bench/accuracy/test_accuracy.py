"""Scores of trained weights: those of the model itself, equal in every way of running it; a wrong way is refused."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from bench.accuracy import __main__ as accuracy  # noqa: E402
from bench.accuracy import ways  # noqa: E402
from bench.accuracy.checkpoints import Checkpoint, load_trained  # noqa: E402
from bench.accuracy.scores import Runner, Score, ScoreError, check_same  # noqa: E402
from bench.accuracy.tasks import TEXTS, ByteVocabulary, Question, TokenizerVocabulary, task  # noqa: E402
from bench.accuracy.ways import WAYS, ScorePlan, measure  # noqa: E402

CPU = torch.device("cpu")
SMALL = ScorePlan(context=24, output=10, questions=3, windows=2, num_draft_tokens=3, batch=2)


@pytest.fixture(scope="module")
def trained() -> Checkpoint:
    return load_trained("trained", "eagle3", CPU)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("figures") / "accuracy.json"
    arguments = ["--questions", "3", "--windows", "2", "--batch", "2", "--k", "3", "--json", str(path)]
    assert accuracy.main(arguments) == 0
    return json.loads(path.read_text())


def test_every_way_has_the_same_score(saved: Any) -> None:
    for text in TEXTS:
        rows = saved["results"][text]
        assert list(rows) == list(WAYS)
        assert {row["exact_match"] for row in rows.values()} == {rows["eager"]["exact_match"]}
        for row in rows.values():
            assert (row["questions"], row["tokens"]) == (3, 8)
            assert row["perplexity"] == pytest.approx(rows["eager"]["perplexity"], rel=1e-4)
    assert saved["results"]["declaration"]["eager"]["exact_match"] == 1  # the target was trained on it
    assert 1 < saved["results"]["declaration"]["eager"]["perplexity"] < 1.1
    assert saved["results"]["gettysburg"]["eager"]["perplexity"] > 2  # and not on this one


def test_drafts_are_accepted_alike_in_every_mode(saved: Any) -> None:
    for text in TEXTS:
        rows = saved["results"][text]
        counted = [(row["mean_length"], row["per_position"]) for way, row in rows.items() if "speculation" in way]
        assert counted == [counted[0]] * 3
        mean_length, rates = counted[0]
        assert len(rates) == 3
        assert rates == sorted(rates, reverse=True)
        assert mean_length == pytest.approx(1 + sum(rates))
        assert rates[0] > 0.3


def test_the_perplexity_is_that_of_one_forward_of_transformers(trained: Checkpoint) -> None:
    model = trained.model()
    one = task("declaration", ByteVocabulary(), context=24, scored=4, questions=1, windows=2)
    expected = []
    for window in one.windows:
        ids = torch.tensor([window.context + window.tail])
        with torch.inference_mode():
            found = -model(ids).logits[0].double().log_softmax(dim=-1)
        expected += [float(found[23 + place, ids[0, 24 + place]]) for place in range(1, 5)]
    for way in ("full", "speculation, full", "generate, graphs"):
        runner = ways.run(trained, way, SMALL)
        assert runner.losses(one.windows) == pytest.approx(expected, rel=1e-4, abs=1e-5)
        runner.generate([[1, 2, 3]], 3)
        runner.close()


@pytest.mark.parametrize("way", ["full", "speculation, full"])
def test_a_way_that_runs_other_weights_is_refused(
    way: str, trained: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ways.run

    def broken(checkpoint: Checkpoint, name: str, plan: ScorePlan) -> Runner:
        runner: Any = honest(checkpoint, name, plan)
        if name != "eager":
            scores = runner.losses
            runner.losses = lambda windows: [1.001 * loss + 1e-3 for loss in scores(windows)]
        return runner

    monkeypatch.setattr(ways, "run", broken)
    with pytest.raises(ScoreError, match=f"declaration, {way}: 0 of 3 answers .* where eager's is"):
        measure(trained, SMALL, ["eager", way])


def test_rounding_is_allowed_in_half_precision_only() -> None:
    expected = Score([True] * 40, [0.5, 0.7], {})
    near = Score([True] * 39 + [False], [0.505, 0.7], {})
    check_same("half", near, expected, torch.bfloat16)
    with pytest.raises(ScoreError, match="single: 1 of 40 answers"):
        check_same("single", near, expected, torch.float32)
    with pytest.raises(ScoreError):
        check_same("half", Score([True] * 40, [0.6, 0.7], {}), expected, torch.bfloat16)
    with pytest.raises(ScoreError):
        check_same("half", Score([True] * 40, [math.nan, 0.7], {}), expected, torch.bfloat16)


def test_the_answer_is_the_next_word() -> None:
    question = Question([1], "people")
    assert question.answered_by(" people to dissolve")
    assert question.answered_by("people")
    assert not question.answered_by(" peoples")
    assert not question.answered_by("")


def test_windows_follow_each_other_and_questions_end_before_a_word() -> None:
    text = TEXTS["gettysburg"].read_text(encoding="utf-8")
    found = task("gettysburg", ByteVocabulary(), context=30, scored=6, questions=20, windows=1000)
    for before, after in itertools.pairwise(found.windows):
        assert before.tail[-1] == after.tail[0]
        assert bytes(before.context + before.tail).decode() in text
    for question in found.questions:
        assert len(question.prompt) == 30
        asked = f"{bytes(question.prompt).decode()} {question.answer}"
        assert " ".join(asked.split()) in " ".join(text.split())
    assert len({question.answer for question in found.questions}) > 10


def test_a_checkpoint_of_another_kind_is_scored_by_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=300, n_positions=128, bos_token_id=256)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--json", str(tmp_path / "out.json"), "--questions", "3", "--windows", "2"]
    assert accuracy.main(arguments) == 1
    assert "has no tokenizer, and a vocabulary of 300" in capsys.readouterr().err
    byte_tokenizer().save_pretrained(tmp_path)
    assert accuracy.main([*arguments, "--batch", "2", "--output", "8"]) == 0
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["load"]["draft"] == "none"
    rows = saved["results"]["gettysburg"]
    assert list(rows) == ["generate", "generate, graphs"]
    assert rows["generate"]["perplexity"] > 50  # random weights
    assert "the reference engine does not run gpt2" in capsys.readouterr().err


def byte_tokenizer() -> Any:
    """A tokenizer of bytes that begins and ends every text with a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate([*alphabet, "<s>"])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 256)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def test_every_context_begins_as_the_tokenizer_begins_a_text() -> None:
    vocabulary = TokenizerVocabulary(byte_tokenizer())
    found = task("gettysburg", vocabulary, context=12, scored=4, questions=5, windows=5)
    prompts = [question.prompt for question in found.questions] + [window.context for window in found.windows]
    assert {(ids[0], len(ids)) for ids in prompts} == {(256, 13)}
    assert vocabulary.decode(found.windows[0].context + found.windows[0].tail) == "Four score and se"


def test_random_weights_have_no_score(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(accuracy.__file__).parents[1] / "models" / "configs" / "tiny"
    assert accuracy.main(["--model", str(folder)]) == 1
    assert "holds neither model.safetensors nor" in capsys.readouterr().err


def test_a_context_longer_than_a_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert accuracy.main(["--context", "1473"]) == 1
    assert "gettysburg has 1476 tokens, the context is 1473; expected one below 1470." in capsys.readouterr().err
