"""`simplegraph advise` on a GPU: its first line is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from bench import advise as advised
from bench.advise import __main__ as bench
from simplegraph.doctor.advise import Advisor

pytestmark = pytest.mark.usefixtures("device_works")
ROOT = Path(advised.__file__).parents[2]
CUDA = torch.device("cuda")


@pytest.mark.alone
def test_the_first_line_tells_what_a_graph_would_gain() -> None:
    """By how much is measured by `python -m bench.advise`, alone on the machine."""
    row = bench.measure(bench.AdvicePlan(("evaluation",), 200), CUDA)["programs"]["evaluation"]
    assert row["called"] == "model", row
    assert "times as fast" in row["first"], row


@pytest.mark.alone  # other tests would keep the host busy
def test_a_gpu_that_is_busy_has_nothing_to_gain() -> None:
    report = bench.advise("busy")
    assert report["lines"][0].endswith(": nothing to gain, the GPU is busy"), report["lines"]
    assert report["watched"][0]["trial"]["gpu_ms"] > 0.8 * report["watched"][0]["trial"]["eager_ms"]


def test_an_engine_with_graphs_is_told_that_they_serve() -> None:
    report = bench.advise(bench.ENGINE)
    assert report["lines"][0].startswith("graphs captured at "), report["lines"]
    assert "serve already, replays: " in report["lines"][0]


def test_what_is_in_the_way_is_told_with_times() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

        def forward(self, x: torch.Tensor) -> Any:
            y = self.layers(x)
            return y if y.sum().item() > 0 else -y

    gate, x = Gate().to(CUDA).eval(), torch.randn(2, 16, device=CUDA)
    with Advisor(sg) as advisor, torch.no_grad():
        for _ in range(24):
            gate(x)
    first = advisor.lines()[0]
    assert first.startswith("`gate` (test_cuda_advise.py:"), first
    assert " ms of which the GPU works " in first
    assert "; no graph: " in first


PROGRAM = """
import torch
from bench.advise.programs import Training
program = Training(torch.device("cuda"))
program.loop()
print([p.double().sum().item() for p in program.agent.parameters()], torch.rand(1, device="cuda").item())
"""


def test_a_program_computes_the_same_to_the_bit(tmp_path: Path) -> None:
    script, report = tmp_path / "program.py", tmp_path / "advice.html"
    script.write_text(PROGRAM)
    run: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT}
    run["env"] = {**os.environ, "PYTHONPATH": str(ROOT)}
    plain = subprocess.run([sys.executable, str(script)], **run)
    command = ["-m", "simplegraph", "advise", "--report", str(report), "--", "python", str(script)]
    watched = subprocess.run([sys.executable, *command], **run)
    assert plain.returncode == 0, plain.stderr
    assert (watched.returncode, watched.stdout) == (0, plain.stdout), watched.stderr
    assert [one for one in json.loads(report.with_suffix(".json").read_text())["watched"] if one["trial"] is not None]


def test_memory_is_given_back() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(CUDA).eval()
    x = torch.randn(1, 2048, device=CUDA)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with Advisor(sg):
            for _ in range(24):
                model(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 64 << 20  # workspaces of cuBLAS; a copy of the model has 128 MiB
