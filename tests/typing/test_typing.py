"""Type checkers complete settings, refuse a typo in one, and know what `wrap` returns: mypy over `cases`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import simplegraph as sg
from simplegraph.manager.manager import CudaGraphSettings

pytest.importorskip("mypy")

CASES = Path(__file__).parent / "cases"
ROOT = Path(__file__).parents[2]


PLUGIN = Path(__file__).parent / "plugin"  # for which mypy's configuration names ours


@pytest.mark.parametrize(("cases", "least"), [(CASES, 12), (PLUGIN, 2)], ids=["cases", "plugin"])
def test_mypy_refuses_the_lines_that_are_marked_and_no_others(cases: Path, least: int, tmp_path: Path) -> None:
    expected = {
        (path.name, number): line.partition("# E: ")[2]
        for path in cases.glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "# E: " in line
    }
    assert len(expected) >= least
    configuration = tmp_path / "mypy.ini"
    configuration.write_text("[mypy]\nstrict = True\n")
    if cases is PLUGIN:
        configuration.write_text("[mypy]\nstrict = True\nplugins = simplegraph.integrations.mypy\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(configuration), "--cache-dir", str(tmp_path), "."]
    environment = os.environ | {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=cases, env=environment, capture_output=True, text=True)
    said = re.findall(r"^(\w+\.py):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    found = {(file, int(line)): message for file, line, message in said}
    assert not done.stderr
    assert found.keys() == expected.keys(), done.stdout
    assert [place for place, message in expected.items() if message not in found[place]] == [], done.stdout


def test_every_setting_is_among_those_that_type_checkers_know() -> None:
    fields = {name: field.type for name, field in sg.CudaGraphConfig.__dataclass_fields__.items()}
    typed = {name: hint.__forward_arg__ for name, hint in CudaGraphSettings.__annotations__.items()}
    assert typed.pop("mode") == f"{fields.pop('mode')} | ModeName"
    assert typed == fields
