"""Calls stand in README and on the page of figures as the benchmarks wrote them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from docs.tools import latency, optimized, tables

ARMS = {"eager": 2933.0, "simplegraph": 695.0, "static": 682.4, "no-guards": 504.1, "make-graphed-callables": 544.0}


def measured(**more: Any) -> dict[str, Any]:
    arms = {arm: {"waited_us": us, "row_us": us / 2} for arm, us in ARMS.items()}
    return {"arms": arms | {"bare-graph": {"failed": "no memory"}}, "dicts": 145, "tensors": 122} | more


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    rows = {"resnet18": measured(guards={"moved_us": 88.04, "settings_us": 2.0}), "8b step": measured()}
    found = {"rows": rows, "machine_info": {"commit": "0123456789", "gpu": {"name": "NVIDIA H200"}}}
    monkeypatch.setattr(latency, "load", lambda file: found)
    return found


def test_tables_show_what_was_measured_and_leave_out_arms_that_failed(figures: dict[str, Any]) -> None:
    waited = tables.make("latency").splitlines()
    assert "| ResNet-18 | 2,933 | 695 | 682 | 504 | 544 |" in waited
    assert "a bare graph" not in waited[0]
    more = tables.make("latency-back-to-back").splitlines()
    assert "| a decode step of 8 B | 1,466 | 348 | 341 | 252 | 272 |" in more
    assert "| ResNet-18 | 145 | 122 | 178 | 41 | 88.0 | 2.0 |" in more
    assert "| a decode step of 8 B | 145 | 122 | 178 | 41 |  |  |" in more


def test_without_figures_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "FILE", "h200_absent")
    assert "Not measured yet" in tables.make("latency")


def test_readme_has_a_row_for_each_model_with_a_number_in_each_cell() -> None:
    head, _, *lines = (line.strip("| ").split(" | ") for line in tables.make("readme").splitlines() if line[:1] == "|")
    ready = ["ready, s: simplegraph", "`sg.optimize`", "`torch.compile`, empty cache"]
    assert head[-5:] == ["**simplegraph**, waited for", "times faster than eager", *ready]
    assert [line[0] for line in lines] == list(optimized.MODELS.values())
    assert {len(line) for line in lines} == {len(head)}
    measured = set(latency.rows())
    for model, *cells in lines:
        numbers = [cell for cell in cells if re.fullmatch(r"\d+\.\d+( to \d+\.\d+)?", cell)]
        assert len(numbers) == len(cells) - (model not in measured), "not waited for: no number"


def test_the_readmes_caption_says_what_its_words_mean() -> None:
    caption = tables.make("readme").partition("\n")[0]
    assert caption.endswith(".")
    assert [word for word in ("`waited for`", "`ready`:", "back to back", "fourth call") if word not in caption] == []
