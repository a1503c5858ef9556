"""Waited calls stand in README and on the page of figures as the benchmark wrote them, and are missed by no other."""

from __future__ import annotations

from typing import Any

import pytest

from docs.tools import latency, tables

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


def test_readmes_table_has_rows_of_waited_calls_for_the_models_that_have_them(figures: dict[str, Any]) -> None:
    lines = [line.split(" | ") for line in tables.make("readme").splitlines() if line.startswith("|")]
    assert len(set(map(len, lines))) == 1
    at = lines[0].index("ResNet-18")
    waited = {line[0]: line[at] for line in lines if line[0].startswith("| waited for")}
    cells = zip(("eager", "**simplegraph**", "`make_graphed_callables`"), ("2.93", "0.69", "0.54"), strict=True)
    assert waited == {f"| waited for: {name}": cell for name, cell in cells}


def test_without_figures_readme_has_no_such_rows_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "FILE", "h200_absent")
    assert "waited for" not in tables.make("readme")
    assert "Not measured yet" in tables.make("latency")
