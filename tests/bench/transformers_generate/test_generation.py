"""The arms of the generation benchmark give the same tokens, and its table says what they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from bench.transformers_generate import families, generation, same_tokens

CPU = torch.device("cpu")
TINY = generation.GenerationPlan(tiny=True, batch=2, prompt=5, tokens=6, rounds=2, compared=6, processes=1)


@pytest.mark.parametrize("name", ["llama", "hybrid", "whisper"])  # a cache, states too, an encoder before it
def test_every_arm_gives_the_same_tokens_and_graphs_are_replayed(name: str) -> None:
    figures = {arm: generation.run_arm(TINY, name, arm, CPU, torch.float32) for arm in TINY.arms}
    plain, static, graphs, own_kernels = (figures[arm]["tokens"] for arm in generation.ARMS)
    assert plain == static == graphs == own_kernels
    assert [len(row) for row in plain] == [6, 6]
    assert figures["simplegraph"]["report"]["replays"] == 3 * 5 - 1
    assert all(len(found["seconds"]) == 3 for found in figures.values())


@pytest.mark.parametrize("name", families.FAMILIES)
def test_ragged_batches_are_compared_with_plain(name: str) -> None:
    assert same_tokens.compare(name, CPU, True, 8, 6) == {"same_tokens": 6, "rows": 8, "parted": 0}


def test_prompts_are_padded_on_the_left_and_masked() -> None:
    model = families.build("llama", CPU, torch.float32, tiny=True)
    batch = families.batch("llama", model, [3, 1])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert (batch["input_ids"] != 0).long().equal(batch["attention_mask"])


def test_tokens_may_part_only_where_two_are_as_likely() -> None:
    plain = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 5.0001]])
    found, expected, third = torch.tensor([1, 1]), torch.tensor([1, 2]), torch.tensor([1, 0])
    assert same_tokens.tokens_in_common("llama", found, expected, plain, plain) == 1
    assert same_tokens.tokens_in_common("llama", expected, expected, plain, plain) == 2
    with pytest.raises(RuntimeError, match="token 1 differs from plain"):
        same_tokens.tokens_in_common("llama", third, expected, plain, plain)
    with pytest.raises(RuntimeError, match=r"logits differ by 0\.1"):
        same_tokens.tokens_in_common("llama", found, expected, plain + 0.1, plain)


def test_tokens_that_graphs_get_wrong_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = same_tokens.generate, []

    def wrong(*args: object) -> torch.Tensor:
        calls.append(args)
        return right(*args) if len(calls) <= 3 else (right(*args) + 1) % 256

    monkeypatch.setattr(same_tokens, "generate", wrong)
    with pytest.raises(RuntimeError, match="token 0 differs from plain"):
        same_tokens.compare("gpt2", CPU, True, 8, 6)


def test_models_measured_in_one_go(here: None, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = [
        "--models",
        "gpt2,whisper",
        "--arms",
        "plain,simplegraph",
        "--device",
        "cpu",
        "--json",
        str(file),
    ]
    generation.main(arguments)
    figures = json.loads(file.read_text())
    assert list(figures["models"]) == ["gpt2", "whisper"]
    for model in figures["models"].values():
        assert model["same_tokens"] == 8
        assert set(model["arms"]) == {"plain", "simplegraph"}
        assert all(arm["first_seconds"] > 0 and arm["ms_per_token"] > 0 for arm in model["arms"].values())


def test_a_model_that_fails_holds_up_no_other(here: None) -> None:
    settings = {"models": ("llama", "no such model"), "arms": ("simplegraph",), "at_once": 2, "timeout": 60}
    found = generation.measure(dataclasses.replace(TINY, **settings), CPU)
    served, missing = (found["models"][name]["arms"]["simplegraph"] for name in settings["models"])
    assert served["ms_per_token"] > 0
    assert "no such model" in missing["failed"]
    assert "took longer than alone" in generation.render(found)


def test_the_table_compares_with_plain() -> None:
    arms = {
        "plain": {"ms_per_token": 30.0, "first_token_ms": 15.0, "first_seconds": 2.0, "busy_share": 0.25},
        "static-compiled": {"ms_per_token": 5.0, "first_seconds": 40.0, "compiled_graphs": 0},
        "simplegraph": {"ms_per_token": 3.0, "first_token_ms": 6.04, "first_seconds": 2},
    }
    skipped = {"static-compiled": {"skipped": "ValueError: no static cache"}}
    models = {
        "gpt2": {"same_tokens": 8, "rows": 8, "parted": 1, "arms": arms},
        "t5": {"failed": "a traceback", "reason": "RuntimeError: t5: token 3", "arms": skipped},
    }
    figures = {"plan": {"batch": 1, "prompt": 8, "tokens": 8}, "device": "cpu", "models": models}
    table = generation.render(figures)
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in table.splitlines()}
    assert rows["gpt2", "plain"] == ["30.000", "1.000", "15.0", "2.00", "20.0", "25%"]
    assert rows["gpt2", "simplegraph"] == ["3.000", "0.100", "6.0", "2.00", "20.0", "-"]
    assert " ".join(rows["gpt2", "static-compiled"]).endswith("(transformers compiled nothing)")
    assert " ".join(rows["t5", "static-compiled"]) == "skipped: ValueError: no static cache"
    assert "have 8 tokens in common with plain, 1 parted" in table
    assert "t5  tokens: RuntimeError: t5: token 3" in table
    assert generation.failures(figures) == ["the comparison of tokens of t5:\na traceback"]


def test_launches_of_several_tokens_give_the_same_tokens() -> None:
    plan = dataclasses.replace(TINY, tokens=16)
    arms = "simplegraph", "simplegraph-4-tokens"
    found = {arm: generation.run_arm(plan, "llama", arm, CPU, torch.float32) for arm in arms}
    one, several = found.values()
    assert one["tokens"] == several["tokens"]
    assert several["report"]["slower"] == {}
    assert any("4 steps" in graph["inputs"].get("launch", "") for graph in several["report"]["graphs"])
