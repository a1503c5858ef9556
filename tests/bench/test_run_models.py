"""One script measures other people's models, each with a JSON of its own, and tells when one of them failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tools import environment

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pytest_benchmark")


# In place of python: measures nothing, but tells what it was asked for; lists of models are the real ones.
RECORDER = """#!/usr/bin/env bash
[[ $1 == -c ]] && exec {python} "$@"
arms="$BENCH_GENERATE_ARMS; $BENCH_MODEL_ARMS"
echo "$*; $BENCH_FAMILIES; $BENCH_MODELS; $arms; $CUDA_VISIBLE_DEVICES" >>{folder}/calls
echo '{{}}' >"${{@: -1}}"
[[ $BENCH_MODELS != unet ]]
"""


def run(folder: Path, pattern: str, **variables: str) -> subprocess.CompletedProcess[str]:
    script = environment.ROOT / "bench" / "run_models.sh"
    # A path without this environment: PYTHON alone says which python runs.
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable, "PATH": os.defpath} | variables
    return subprocess.run(
        [str(script), str(folder), pattern], env=os.environ | variables, capture_output=True, text=True, check=False
    )


def test_a_json_for_the_model_that_matches(tmp_path: Path) -> None:
    done = run(tmp_path, "models convnet", BENCH_MODEL_ARMS="eager")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [file.name for file in tmp_path.glob("*.json")] == ["models_convnet.json"]
    figures = json.loads((tmp_path / "models_convnet.json").read_text())["benchmarks"][0]["extra_info"]["models"]
    assert list(figures["convnet"]) == ["eager"]
    assert figures["convnet"]["eager"]["first_seconds"] > 0


def test_every_model_is_measured_once_on_some_gpu_and_what_fails_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(RECORDER.format(python=sys.executable, folder=tmp_path))
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "CUDA_VISIBLE_DEVICES": "1,3", "BENCH_GENERATE_ARMS": "plain"}
    done = run(tmp_path, "generate (gpt2|t5)|models (convnet|unet)", **variables)
    assert done.returncode != 0  # as that of `unet` is
    names = {"generate_gpt2.json", "generate_t5.json", "models_convnet.json", "models_unet.json"}
    assert {file.name for file in tmp_path.glob("*.json")} == names
    calls = [line.split("; ") for line in (tmp_path / "calls").read_text().splitlines()]
    asked = {(call[0].split()[2], call[1] if "generate" in call[0] else call[2]) for call in calls}
    generate = "bench/transformers_generate/test_transformers_generate.py"
    models = "bench/models_first_call/test_models.py"
    assert asked == {(generate, "gpt2"), (generate, "t5"), (models, "convnet"), (models, "unet")}
    assert len(calls) == 4
    assert {call[3] for call in calls} == {"plain"}
    assert all("compiled-reduce-overhead" in call[4] for call in calls)
    assert {call[5] for call in calls} <= {"1", "3"}
    unknown = run(tmp_path, "generate gpt3", **variables)
    assert unknown.returncode != 0
    assert "no model matches generate gpt3" in unknown.stderr
