"""Rounds of several calls make one file, with statistics over all of them, or a refusal that says what differs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from bench.startup import merge, runs
from docs.tools import raw, tables

pytest.importorskip("pytest_benchmark", reason='pip install -e ".[bench]"')

GPU = {"name": "NVIDIA H200", "driver": "580.1"}


def benchmark(arm: str, ready: list[float], cache: str | None = None) -> dict[str, Any]:
    start = cache or "first"
    info = {
        "arm": arm,
        "label": runs.Run(arm, cache).label,
        "status": "ok",
        "model": "8b",
        "sizes": [1, 2],
        "device": "cuda",
        "replays": 7,
        "seconds": {"ready": sorted(ready)[len(ready) // 2]},
        "step_ms": dict.fromkeys(("1", "8", "64", "256"), 5.0),
        "device_bytes": 2**30,
        "rounds": [{"ready": one} for one in ready],
        "processes": [
            {"pid": number, "seconds": {"ready": one}, "step_ms": {"1": one * 2}} for number, one in enumerate(ready)
        ],
    }
    return {
        "name": f"test_startup[{arm}-{start}]",
        "fullname": f"bench/startup/test_startup.py::test_startup[{arm}-{start}]",
        "params": {"arm": arm, "start": start},
        "param": f"{arm}-{start}",
        "extra_info": info,
        "stats": {"data": ready, "rounds": len(ready), "iterations": 1},
    }


def call(*benchmarks: dict[str, Any], node: str = "one", **machine: Any) -> dict[str, Any]:
    where = {"node": node, "gpu": GPU, "torch": "2.11.0+cu130", "python": "3.12.3", "cuda": "13.0", "commit": "c0ffee"}
    where |= {"versions": {"triton": "3.6.0"}, "kernels": {}, **machine}
    return {"machine_info": where, "datetime": "now", "benchmarks": list(benchmarks)}


def files(folder: Path, *calls: dict[str, Any]) -> list[str]:
    paths = [folder / f"{number}.json" for number in range(len(calls))]
    for path, each in zip(paths, calls, strict=True):
        path.write_text(json.dumps(each), encoding="utf-8")
    return [str(path) for path in paths]


def test_rounds_of_calls_are_one_benchmarks_rounds() -> None:
    merged = merge.merged(
        [
            call(benchmark("simplegraph", [1.0, 5.0]), benchmark("eager", [1.0])),
            call(benchmark("simplegraph", [2.0]), node="two"),
        ]
    )
    ours, eager = merged["benchmarks"]
    assert ours["stats"]["data"] == [1.0, 5.0, 2.0]
    assert (ours["stats"]["median"], ours["stats"]["min"], ours["stats"]["max"]) == (2.0, 1.0, 5.0)
    assert (ours["stats"]["rounds"], ours["stats"]["iterations"]) == (3, 1)
    info = ours["extra_info"]
    assert (info["seconds"], info["step_ms"]) == ({"ready": 2.0}, {"1": 4.0, "8": 5.0, "64": 5.0, "256": 5.0})
    assert info["rounds"] == [{"ready": 1.0}, {"ready": 5.0}, {"ready": 2.0}]
    assert [process["pid"] for process in info["processes"]] == [0, 1, 0]
    assert info["replays"] == 7
    assert eager["stats"]["data"] == [1.0]
    assert [each["node"] for each in merged["calls"]] == ["one", "two"]
    assert merged["comparison"]["ready_ours_over_eager"] == 2.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpu": GPU | {"name": "NVIDIA H100"}}, "gpu: NVIDIA H200 in 0.json, NVIDIA H100 in 1.json"),
        ({"commit": "f00"}, "commit: c0ffee in 0.json, f00 in 1.json"),
        ({"versions": {"triton": "3.7.0"}}, "versions: "),
    ],
)
def test_calls_of_other_machines_or_commits_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A median over two commits or cards is a figure of neither."""
    given = files(tmp_path, call(benchmark("eager", [1.0])), call(benchmark("eager", [2.0]), **change))
    out = tmp_path / "merged.json"
    with pytest.raises(SystemExit, match="2"):
        merge.main([str(out), *given])
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_starts_of_other_shapes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = copy.deepcopy(benchmark("eager", [2.0]))
    other["extra_info"]["sizes"] = [1]
    given = files(tmp_path, call(benchmark("eager", [1.0])), call(other))
    with pytest.raises(SystemExit, match="2"):
        merge.main([str(tmp_path / "merged.json"), *given])
    assert "test_startup[eager-first], sizes: [1, 2] in 0.json, [1] in 1.json" in capsys.readouterr().err


def test_a_file_that_is_not_there_or_holds_no_starts_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty,) = files(tmp_path, {"results": {}})
    for given in (empty, str(tmp_path / "absent.json")):
        with pytest.raises(SystemExit, match="2"):
            merge.main([str(tmp_path / "merged.json"), given])
        assert f"{given!r} is no file that pytest-benchmark wrote of bench/startup" in capsys.readouterr().err


def test_the_table_of_the_documentation_is_written_from_the_merged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody copies a cell or a ratio by hand."""
    ours, cold = benchmark("simplegraph", [1.0, 2.0]), benchmark("compiled-piecewise", [20.0], "cold")
    warm = benchmark("compiled-piecewise", [8.0], "warm")
    merged = merge.merged([call(ours, cold, warm), call(benchmark("simplegraph", [3.0, 2.0]))])
    for module in (raw, tables):
        monkeypatch.setattr(module, "load", lambda name: {"h200_startup": merged}[name])
    table = tables.make("startup-beside-compiled")
    assert "| compiled-piecewise (warm) |  | 8.0 |" in table, "one start tells no hundredths"
    assert "Medians of 4 processes, and 1 of each compiled arm, in 2 calls, each on one H200, commit c0ffee." in table
    assert "All 2 sizes were ready 10.0 times sooner than with compiled piecewise graphs" in table
    assert "and 4.0 times sooner than\nfrom a filled one: starts took 1.00 to 3.00 s, 20.00 to 20.00 s" in table
