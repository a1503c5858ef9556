"""The table must say what ran, what did not and why, and never pass emulation off as speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.startup import __main__ as command
from bench.startup import table
from bench.startup.runs import combine, comparison
from bench.tools.tables import MIB

GPU = {"name": "NVIDIA H200", "driver": "580.1", "bytes": 1, "capability": "9.0"}


def result(arm: str, ready: float, *, device: str = "cuda", **more: Any) -> dict[str, Any]:
    where = {
        "gpu": GPU if device == "cuda" else None,
        "cores": 2,
        "torch": "2.11",
        "python": "3.12",
        "commit": "c0ffee",
    }
    settings = {"model": "8b", "parameters": 8e9, "dtype": "bfloat16", "sizes": [1, 2], "context": 200}
    return {
        "arm": arm,
        "status": "ok",
        "device": device,
        "environment": where,
        "attention": "FlashAttention-3",
        "seconds": {"first_output": 0.25, "ready": ready},
        "step_ms": {"1": 5.0, "64": 7.0},
        "host_us": 10.0,
        "correct": [{"count": 1, "captured": True, "error": 0.001, "equal": False}],
        "graphs": "CUDA graphs",
        "notes": [],
        **settings,
        **more,
    }


@pytest.fixture
def results() -> dict[str, dict[str, Any]]:
    primed = {"seconds": {"ready": 1.0}, "device_bytes": 400 * MIB}
    ours = {"seconds": {"ready": 0.4}, "device_bytes": 200 * MIB}
    return {
        "simplegraph": result("simplegraph", 0.5, device_bytes=300 * MIB, primed=ours),
        "plain-loop": result("plain-loop", 1.5, primed=primed),
        "compiled-piecewise (cold)": result("compiled-piecewise", 30.0),
        "compiled-full (cold)": {"arm": "compiled-full", "status": "failed", "error": "RuntimeError: no luck"},
    }


def test_a_row_holds_the_figures_and_how_often_sooner_it_is_than_piecewise(results: dict[str, Any]) -> None:
    row = next(line for line in table.render(results).splitlines() if line.startswith("simplegraph"))
    for figure in ("0.250", "0.500", "60.0x", "0.400", "300", "200", "5.00", "7.00", "10.0", "1e-03"):
        assert figure in row.split(), figure


def test_what_failed_is_listed_with_its_error(results: dict[str, Any]) -> None:
    assert "compiled-full (cold): failed: RuntimeError: no luck" in table.render(results)


def test_the_heading_names_machine_commit_and_attention(results: dict[str, Any]) -> None:
    heading = table.heading(results)
    for part in ("NVIDIA H200", "580.1", "2.11", "c0ffee", "8 B parameters", "FlashAttention-3"):
        assert part in heading


def test_emulated_figures_are_called_no_speed() -> None:
    text = table.render({"simplegraph": result("simplegraph", 0.5, device="cpu", graphs="emulator")})
    assert "NOT speed" in text
    assert "piecewise/" not in text
    assert "host us" in table.render({"simplegraph": result("simplegraph", 0.5)})


def test_the_comparison_holds_the_ratios_of_what_ran(results: dict[str, Any]) -> None:
    assert comparison(results) == {
        "ready_plain_loop_over_ours": 3.0,
        "again_plain_loop_over_ours": 2.5,
        "memory_ours_over_plain_loop": 0.5,
        "ready_piecewise_cold_over_ours": 60.0,
    }


def test_captures_alone_are_compared_with_the_loop_and_with_eager(results: dict[str, Any]) -> None:
    results["eager"] = result("eager", 0.4)
    results["simplegraph"] |= {"details": {"captures_alone_s": 0.3}}
    results["simplegraph"]["primed"] |= {"details": {"captures_alone_s": 0.2}}
    ratios = comparison(results)
    assert ratios["ready_ours_over_eager"] == 1.25
    assert ratios["ready_our_captures_alone_over_eager"] == pytest.approx(0.75)
    assert ratios["again_our_captures_alone_over_plain_loop"] == 0.2
    assert comparison({name: each | {"device": "cpu"} for name, each in results.items()}) == {}


def test_rounds_are_combined_by_median_and_kept() -> None:
    combined = combine([result("simplegraph", ready) for ready in (0.9, 0.4, 0.5)])
    assert combined["seconds"]["ready"] == 0.5
    assert [one["ready"] for one in combined["rounds"]] == [0.9, 0.4, 0.5]


def test_one_failed_round_fails_the_run() -> None:
    bad = {"arm": "simplegraph", "status": "failed", "error": "no"}
    assert combine([result("simplegraph", 0.5), bad]) == bad


def test_no_figures_at_all_still_gives_a_table(results: dict[str, Any]) -> None:
    assert "no luck" in table.render({"x": results["compiled-full (cold)"]})


def test_without_figures_the_command_says_so_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arms", "plain-loop", "--device", "cpu", "--json", str(tmp_path / "startup.json")]
    assert command.main(arguments) == 1
    printed = capsys.readouterr()
    assert "plain-loop: not available: " in printed.out
    assert "no arm has figures" in printed.err


def test_a_sentence_says_what_was_found(results: dict[str, Any]) -> None:
    """A reader of the table alone did not see what it means."""
    results["eager"] = result("eager", 0.4) | {"step_ms": {"1": 10.0, "64": 8.0}}
    assert table.render(results).splitlines()[-1] == (
        "Found: simplegraph had 2 batch sizes ready 0.50 s after the model was built, 60.0 times sooner than "
        "torch.compile (cold cache); a step takes 0.50 of eager's step at batch 1, 0.88 of eager's step at batch 64."
    )
    emulated = {"simplegraph": result("simplegraph", 0.5, device="cpu")}
    assert table.finding(emulated) == (
        "Found: simplegraph had 2 batch sizes ready 0.50 s after the model was built; at captured sizes 0/1 answers "
        "are eager's to the bit, the largest error is 1e-03."
    )
    assert table.finding({"eager": results["eager"]}) == ""
