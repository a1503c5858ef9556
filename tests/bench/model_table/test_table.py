"""The table of other people's models: rows of a sample as the committed ones, answers eager's, limits told."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.model_table import answers, builders, table, times
from bench.model_table.entries import CATEGORIES, ENTRIES, GENERATION
from bench.model_table.row import BY_NAME, EAGER, FAILED, FULL, MISSING, PIECEWISE, Row, measure_row
from bench.model_table.serving import ServedModel, inner_call
from bench.tools import replays

FILE = Path(__file__).parents[3] / "bench" / "results" / "emulator_model_table.json"
ROWS: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
SAMPLE = [
    "Llama",
    "Jamba",
    "Whisper",
    "Qwen2-VL",
    "DeBERTa-v3",
    "Funnel",
    "CLIP",
    "Wav2Vec2",
    "torch/LSTM",
    "timm/convnext_tiny",
    "torchvision/resnet18",
    "diffusers/StableDiffusion",
    "peft/LoRA-Llama",
]


@pytest.mark.proofs
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_runs_as_the_table_says_and_answers_as_eager_does(name: str) -> None:
    row = measure_row(name, "cpu", tiny=True)
    if row["column"] == MISSING:
        pytest.skip(row["reason"])
    assert row["answers"] == "equal", row.get("wrong")
    assert row["column"] == ROWS[name]["column"], row


def test_the_committed_table_has_every_entry_and_no_wrong_answer() -> None:
    assert list(ROWS) == [entry.name for entry in ENTRIES]
    measured = {name: row for name, row in ROWS.items() if row["column"] != MISSING}
    assert {name: row for name, row in measured.items() if row.get("answers") != "equal"} == {}
    assert all("ms" not in row for row in ROWS.values())  # an emulator's times say nothing
    assert all(row.get("reason") for row in measured.values() if row["column"] == EAGER)
    assert len(measured) >= 120


def test_the_sample_is_spread_over_the_categories() -> None:
    known = {entry.name: entry for entry in ENTRIES}
    assert len(set(SAMPLE)) == 13
    assert {known[name].category for name in SAMPLE} >= {*CATEGORIES} - {"sentence-transformers"}
    assert not [name for name in SAMPLE if not known[name].has_tiny_shape]


def test_a_model_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert measure_row("timm/resnet50", "cpu", tiny=True) == {"column": MISSING, "reason": "timm is not installed"}


class Turns(contextlib.AbstractContextManager[None]):
    """Counts how often a row measured."""

    def __init__(self) -> None:
        self.taken = 0

    def __exit__(self, *exc_info: object) -> None:
        self.taken += 1


def _by_tokens(call: Any, device: torch.device) -> float:
    with replays.timed(call, 1) as generate:
        return generate().shape[-1] * 1e-3


@pytest.mark.proofs
@pytest.mark.parametrize("name", ["torch/GRU", "Llama", "BERT"])
def test_a_row_on_a_gpu_times_eager_and_replays_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(times, "kernel_milliseconds", lambda call, calls: 0.25)
    monkeypatch.setattr(times, "BUDGET", 0.002)
    monkeypatch.setattr(times, "LONG", {"eager_ms": 5, "ms": 6})
    turns, entry = Turns(), BY_NAME[name]
    if entry.integration == GENERATION:  # by a clock that goes with the tokens: short ones' differences may be below 0
        monkeypatch.setattr(times, "seconds", _by_tokens)
    with torch.no_grad():
        row = Row(entry, builders.find(entry), torch.device("cpu"), tiny=True)
        figures = row.timed(row.served_whole, turns, FULL)
    assert figures["dtype"] == "bfloat16"
    assert figures["eager_ms"] == pytest.approx(1.0) if entry.integration == GENERATION else figures["eager_ms"] > 0
    assert figures["timed"]["replays"] >= figures["timed"]["steps"]
    # Of a decode step: what a long generation has more than a short one.
    assert figures["kernel_ms"] == (0 if entry.integration == GENERATION else 0.25)
    # No host is as fast as these kernels: a generation is timed again, by graphs of several tokens.
    assert turns.taken == (4 if entry.integration == GENERATION else 2)
    assert figures.get("tokens_per_launch") == (4 if entry.integration == GENERATION else None)
    assert ("one_token" in figures) == (entry.integration == GENERATION)


def test_a_sentence_encoders_own_call_is_timed_by_the_arguments_that_it_gets() -> None:
    encoder = torch.nn.Linear(2, 2)

    def encode(numbers: list[float], *, double: bool) -> Any:
        return encoder(input=torch.tensor(numbers) * (1 + double))

    served = ServedModel(encode, None, encoder=encoder)
    args, kwargs = inner_call(served, ([1.0, 2.0],), {"double": True})
    assert (args, list(kwargs), kwargs["input"].tolist()) == ((), ["input"], [2.0, 4.0])
    assert "forward" not in vars(encoder)


def test_a_limit_that_a_row_does_not_keep_is_told() -> None:
    row = {"column": FULL, "answers": "equal", "eager_ms": 1.0, "ms": 0.5, "kernel_ms": 0.42}
    assert table.limits(row) == []
    assert table.limits(row | {"ms": 1.03, "kernel_ms": 1.0}) == ["1.03 times eager"]
    assert table.limits(row | {"ms": 0.6}) == ["kernels * 1.15 + 117 us"]
    assert table.limits(row | {"ms": 0.6, "column": PIECEWISE}) == []
    assert table.limits(row | {"ms": 0.6, "encoder": {"ms": 0.1, "kernel_ms": 0.07}}) == []  # Python around a replay
    assert table.limits({"column": FULL, "answers": "differ"}) == ["answers differ"]
    assert table.limits({"column": FULL, "answers": "equal", "untimed": "no memory\nat all"}) == ["untimed: no memory"]


def test_shares_are_of_the_rows_that_could_be_measured() -> None:
    rows = {name: {"column": FULL, "answers": "equal"} for name in "abc"}
    rows |= {"d": {"column": EAGER, "answers": "equal", "reason": "hooks"}, "e": {"column": MISSING, "reason": "-"}}
    told = table.summary(rows)
    assert told[:2] == ["4 of 5 rows measured: 3 full, 1 eager.", "Full 75%; with piecewise or parts 75%."]
    assert told[-1] == "- 1 eager, hooks: d"


def test_wrong_answers_and_crashes_fail_the_command() -> None:
    rows = {"a": {"column": FULL, "wrong": "differs"}, "b": {"column": FAILED, "reason": "it died"}}
    assert table.failures({"rows": rows}) == ["a: differs", "b: it died"]


FINE = {"column": FULL, "answers": "equal", "eager_ms": 1.0, "ms": 0.5, "kernel_ms": 0.45}
STARVED = {"column": FAILED, "reason": "OutOfMemoryError: CUDA out of memory"}
UNTIMED = {"column": FULL, "answers": "equal", "untimed": "OutOfMemoryError: CUDA out of memory"}


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Take rows from a list in place of processes; returns what ran: how many at once, and which rows."""
    ran: list[tuple[int, list[str]]] = []
    rows = {"Llama": [FINE], "BERT": [UNTIMED, FINE], "ViT": [STARVED, FINE], "T5": [FINE | {"ms": 0.7}, STARVED]}

    class Processes:
        def __init__(self, *, workers: int, gpus: int, seconds: float, total: float) -> None:
            self._workers = workers

        def run(self, tasks: dict[str, Any]) -> Any:
            ran.append((self._workers, list(tasks)))
            yield from ((name, rows[name].pop(0)) for name in tasks)

    monkeypatch.setattr(table, "SideBySide", Processes)
    monkeypatch.setattr(table.fresh, "preload", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return ran


def test_rows_that_found_no_memory_or_broke_a_limit_are_tried_again_beside_fewer(
    rounds: list[tuple[int, list[str]]],
) -> None:
    plan = table.TablePlan(only=("Llama", "T5", "BERT", "ViT"), workers=12)
    figures = table.measure(plan, torch.device("cuda"))
    assert rounds == [(12, ["Llama", "T5", "BERT", "ViT"]), (3, ["T5", "BERT", "ViT"])]
    assert {name: row["ms"] for name, row in figures["rows"].items()} == {
        "Llama": 0.5,
        "T5": 0.7,
        "BERT": 0.5,
        "ViT": 0.5,
    }


def test_more_measures_again_what_failed_and_keeps_the_rest(
    rounds: list[tuple[int, list[str]]], tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps({"rows": {"Llama": FINE, "ViT": STARVED}}), encoding="utf-8")
    table.measure(table.TablePlan(only=("Llama", "ViT"), more=True, json=file), torch.device("cuda"))
    assert rounds[0] == (1, ["ViT"])
    assert list(json.loads(file.read_text(encoding="utf-8"))["rows"]) == ["Llama", "ViT"]


def test_an_answer_is_compared_in_all_its_parts() -> None:
    wanted = answers.clone({"logits": torch.ones(2, 3), "kept": (torch.tensor([1, 2]), None, "x")})
    assert (
        answers.difference({"logits": torch.ones(2, 3) + 1e-6, "kept": [torch.tensor([1, 2]), None, "x"]}, wanted)
        < 1e-5
    )
    for wrong in (
        {"logits": torch.ones(2, 3) + 0.1, "kept": (torch.tensor([1, 2]), None, "x")},
        {"logits": torch.ones(2, 3), "kept": (torch.tensor([1, 3]), None, "x")},
        {"logits": torch.ones(2, 3), "kept": (torch.tensor([1, 2]), None, "y")},
        {"logits": torch.ones(2, 4), "kept": (torch.tensor([1, 2]), None, "x")},
        {"logits": torch.full((2, 3), torch.nan), "kept": (torch.tensor([1, 2]), None, "x")},
        {"logits": torch.ones(2, 3)},
    ):
        with pytest.raises(answers.WrongAnswer):
            answers.difference(wrong, wanted)


def test_only_tokens_that_the_mask_shows_are_compared() -> None:
    wanted = answers.clone(torch.ones(2, 3, 4))
    found, visible = torch.ones(2, 3, 4), torch.tensor([[True, True, True], [True, False, False]])
    found[1, 1] = 7
    assert answers.difference(found, wanted, visible) == 0
    with pytest.raises(answers.WrongAnswer):
        answers.difference(found, wanted)
