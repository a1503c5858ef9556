"""`bench.serve.beside_vllm` measures each engine in a process of its own; vLLM is a stand-in here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STAND_IN = """
__version__ = "0.0 of a test"


class SamplingParams:
    def __init__(self, *, max_tokens, **_):
        self.max_tokens = max_tokens


class _Engine:
    def __init__(self):
        self.left = 0

    def step(self):
        self.left -= 1


class _Output:
    def __init__(self, tokens):
        self.outputs = [type("", (), {"token_ids": [0] * tokens})]


class LLM:
    def __init__(self, **settings):
        assert settings["load_format"] == "dummy"
        self.llm_engine = _Engine()

    def generate(self, prompts, sampling, use_tqdm):
        self.llm_engine.left = sampling.max_tokens
        while self.llm_engine.left:
            self.llm_engine.step()
        return [_Output(sampling.max_tokens) for _ in prompts]
"""


def run(folder: Path, *options: str, path: str = "") -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = folder / "figures.json"
    line = [sys.executable, "-m", "bench.serve.beside_vllm", "--json", str(file), "--batches", "1,3", *options]
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=300)
    return result, json.loads(file.read_text())["arms"]


@pytest.mark.timeout(300)
def test_both_engines_are_measured(tmp_path: Path) -> None:
    package = tmp_path / "site" / "vllm"
    (package / "entrypoints").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "entrypoints" / "__init__.py").touch()
    (package / "entrypoints" / "llm.py").touch()
    result, arms = run(tmp_path, "--arms", "simplegraph,vllm-compiled", path=str(tmp_path / "site"))
    assert result.returncode == 0, result.stderr
    assert list(arms) == ["simplegraph", "vllm, compiled"]
    for figures in arms.values():
        assert list(figures["batches"]) == ["1", "3"]
        assert figures["first_answer_s"] > figures["engine_s"] > 0
        assert all(row["step_ms"] > 0 and row["first_tokens_ms"] > 0 for row in figures["batches"].values())
    assert arms["vllm, compiled"]["version"] == "0.0 of a test"


@pytest.mark.timeout(300)
def test_an_arm_that_cannot_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('built for another torch')")
    result, arms = run(tmp_path, "--arms", "vllm-full-graphs", path=str(tmp_path))
    assert result.returncode == 1
    assert "an arm failed" in result.stderr
    assert "built for another torch" in result.stderr
    assert "error" in arms["vllm, full graphs"]
