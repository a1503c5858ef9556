"""How much of the package one has to know to follow a call: the functions and files that it enters, and climbs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_house import ROOT, imported_files


@functools.cache
def floor(path: Path) -> int:
    """The longest chain of imports below a file of the package, without doors."""
    below = imported_files(path) if path.name != "__init__.py" else ()
    return 1 + max((floor(file) for file in below if file.name != "__init__.py"), default=0)


# Limits are what the scenes take, and at most two functions more. A capture that tells probes of its events climbs to
# each of them, a walk to what its policy opens, and a cache by class to what it calls. Each change in the life of a
# call is a function of its own, which may be read by name. A comparison is one file for a replay. What builds graphs
# was divided, and so was what a reading expects, and what undoes and watches runs: more files, each smaller.
# Functions of torch, which may be replaced, are read in each scene.
@pytest.mark.parametrize(
    ("scene", "functions", "files", "climbs"), [("module", 674, 77, 26), ("replay", 16, 7, 0), ("step", 834, 84, 36)]
)
def test_a_call_enters_few_functions_and_files(scene: str, functions: int, files: int, climbs: int) -> None:
    script = ROOT / "tests" / "support" / "traced.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, str(script), scene], capture_output=True, text=True, check=True, env=environment
    )
    entered = json.loads(run.stdout)
    up = [pair for pair in entered["calls"] if floor(Path(pair[1])) > floor(Path(pair[0]))]
    assert entered["functions"] <= functions
    assert entered["files"] <= files
    assert len(up) <= climbs, up


def modules_after(statement: str) -> set[str]:
    """Names the modules of the package that a process has after a statement, torch being there before."""
    code = f"import sys, torch; {statement}; print(*(name for name in sys.modules if name.startswith('simplegraph')))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return set(run.stdout.split())


def test_importing_the_package_loads_no_core() -> None:
    loaded = modules_after("import simplegraph")
    assert "simplegraph.integrations" in loaded
    assert not {name for name in loaded if name.startswith(("simplegraph.serve", "simplegraph.manager"))}


def test_an_engine_is_imported_without_its_probes_and_the_readers_of_python_state() -> None:
    """Who changes the engine need not read what looks on at its captures."""
    loaded = modules_after("from simplegraph import CudaGraphManager")
    probes = {"program.snapshot", "program.escapes", "program.host_modes", "program.observe", "device.inventory"}
    probes |= {
        "manager.observation",
        "manager.touched",
        "manager.replay_proof",
        "program.breaks.eager",
        "guard.functions",
    }
    assert "simplegraph.manager.capture" in loaded
    assert loaded & {f"simplegraph.{name}" for name in probes} == set()
