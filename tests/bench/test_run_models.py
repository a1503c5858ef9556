"""One script measures other people's models, each with a JSON of its own, and tells when one of them failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import environment

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pytest_benchmark")


def run(folder: Path, pattern: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = environment.ROOT / "bench" / "run_models.sh"
    variables |= {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "BENCH_GENERATE_ARMS": "plain,simplegraph"}
    return subprocess.run(
        [str(script), str(folder), pattern], env=os.environ | variables, capture_output=True, text=True, check=False
    )


def test_a_json_for_each_model_that_matches(tmp_path: Path) -> None:
    done = run(tmp_path, "generate gpt2|models convnet", BENCH_MODEL_ARMS="eager,simplegraph")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {file.name for file in tmp_path.glob("*.json")} == {"generate_gpt2.json", "models_convnet.json"}
    generated, called = (
        json.loads((tmp_path / name).read_text())["benchmarks"][0]["extra_info"]["models"]
        for name in ("generate_gpt2.json", "models_convnet.json")
    )
    assert list(generated["gpt2"]["arms"]) == ["plain", "simplegraph"]
    assert list(called["convnet"]) == ["eager", "simplegraph"]
    assert called["convnet"]["simplegraph"]["first_seconds"] > 0


def test_what_fails_is_told(tmp_path: Path) -> None:
    unknown = run(tmp_path, "generate gpt3")
    assert unknown.returncode != 0
    assert "no model matches generate gpt3" in unknown.stderr
    failed = run(tmp_path, "models convnet", BENCH_MODEL_ARMS="no such arm")
    assert failed.returncode != 0
    assert "KeyError: 'no such arm'" in failed.stdout
