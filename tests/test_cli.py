"""``python -m simplegraph``, as people run it."""

from __future__ import annotations

import json
import subprocess
import sys

import simplegraph


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "simplegraph", *arguments], capture_output=True, text=True)


def test_doctor_finds_nothing_wrong_on_a_machine_where_the_tests_pass() -> None:
    done = run("doctor", "--json")
    findings = json.loads(done.stdout)
    assert [finding for finding in findings if not finding["ok"]] == []
    assert {"versions", "GPU", "capture and replay", "recovery from a failed capture"} <= {f["name"] for f in findings}
    assert done.returncode == 0


def test_version_is_the_packages_own() -> None:
    assert run("--version").stdout.strip() == simplegraph.__version__
