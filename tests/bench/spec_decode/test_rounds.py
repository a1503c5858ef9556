"""``python -m bench.spec_decode``: every arm is measured, and what it says is what was counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from bench.spec_decode import __main__ as spec_decode
from bench.spec_decode.rounds import ARMS, ratios, render


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("figures") / "spec_decode.json"
    arguments = ["--batches", "1,3", "--output", "14", "--prompt", "12", "--k", "3", "--json", str(path)]
    assert spec_decode.main(arguments) == 0
    return json.loads(path.read_text())


def test_every_arm_drafts_and_accepts_the_same(figures: Any) -> None:
    rows = figures["results"]
    assert {(row["arm"], row["batch"]) for row in rows} == {(arm, batch) for arm in ARMS for batch in (1, 3)}
    for batch in (1, 3):
        counted = [
            (row["drafts"], row["draft_tokens"], row["accepted_tokens"], row["per_position"])
            for row in rows
            if row["batch"] == batch and row["arm"] != "no speculation"
        ]
        assert counted == [counted[0]] * 5
        drafts, draft_tokens, accepted, per_position = counted[0]
        assert draft_tokens == 3 * drafts
        assert sum(per_position) * drafts == pytest.approx(accepted)
        assert 0 < accepted < draft_tokens
    for row in rows:
        assert row["tpot_ms"] > 0
        assert ("draft_ms" in row) == (row["arm"] != "no speculation")


def test_ratios_compare_full_graphs_with_the_others(figures: Any) -> None:
    rows = {(row["arm"], row["batch"]): row for row in figures["results"]}
    for row in ratios(figures["results"]):
        full, eager = rows["full", row["batch"]], rows["target full, draft eager", row["batch"]]
        assert row["eager_draft_over_full"] == eager["draft_ms"] / full["draft_ms"]
        assert row["tpot, eager over full"] == rows["eager", row["batch"]]["tpot_ms"] / full["tpot_ms"]
        assert row["round_host_ms"] == full["round_host_ms"]
    table = render(figures["results"])
    assert f"{rows['full', 3]['mean_length']:.2f}" in table
    assert all(arm in table for arm in ARMS)


def test_random_weights_take_the_mean_length_that_is_set(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["--model", "tiny", "--draft", "eagle", "--arms", "full", "--batches", "4", "--output", "40"]
    assert spec_decode.main([*arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["load"]["mean_length"] == 2.4
    assert found["results"][0]["mean_length"] == pytest.approx(2.4, abs=0.25)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "4000"], "num_draft_tokens is 4000; expected below max_model_len=48"),
    ],
)
def test_what_does_not_fit_is_said_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert spec_decode.main([*arguments, "--arms", "full"]) == 1
    assert words in capsys.readouterr().err
