"""Figures say what they were measured with: machine, versions and commit, in every benchmark's file."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from bench.tools import environment
from bench.tools.files import save_figures

BENCH = environment.ROOT / "bench"
WRITERS = {"tools/files.py"}
CONFIG = {"spec_decode/train_eagle.py", "vllm_audit.py"}  # a config of a model; the audit runs in vLLM's environment


def test_a_description_lacks_nothing_and_says_so_where_it_does() -> None:
    described = environment.describe()
    assert environment.missing(described) == []
    assert described["versions"]["torch"].split("+")[0] == described["torch"].split("+")[0]
    assert set(described["versions"]) == set(environment.LIBRARIES)
    gpu = {"name": "H200", "driver": "unknown"}
    versions = {name: None for name in environment.LIBRARIES if name != "triton"}
    lacking = described | {"gpu": gpu, "commit": "unknown", "versions": versions}
    assert environment.missing(lacking) == ["gpu.driver", "commit", "versions.triton"]
    assert {"gpu", "commit", "versions", "versions.vllm"} <= set(environment.missing({}))


def test_figures_are_written_with_the_machine(tmp_path: Path) -> None:
    save_figures(tmp_path / "new" / "one.json", {"results": [1]})
    found = json.loads((tmp_path / "new" / "one.json").read_text())
    assert found["results"] == [1]
    assert environment.missing(found["machine_info"]) == []
    save_figures(tmp_path / "two.json", {"results": []}, {"gpu": None, "commit": "c0ffee"})
    assert json.loads((tmp_path / "two.json").read_text())["machine_info"]["commit"] == "c0ffee"


def test_every_benchmark_writes_its_figures_in_one_way() -> None:
    writers, silent = set(), []
    for path in sorted(BENCH.rglob("*.py")):
        file = str(path.relative_to(BENCH))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        named = {ast.unparse(call.func) for call in calls}
        if any(ast.unparse(call.func).endswith("write_text") and "json.dumps" in ast.unparse(call) for call in calls):
            writers.add(file)
        elif "json_file" in named and "save_figures" not in named:
            silent.append(file)
    assert writers == WRITERS | CONFIG
    assert silent == []
