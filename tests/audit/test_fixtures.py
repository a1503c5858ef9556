"""A test of audits that fails leaves nothing to the tests after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FAILS_FIRST = """
import simplegraph as sg

def test_fails():
    sg.audit.start()
    raise RuntimeError("before stop()")

def test_next():
    assert sg.Audit.attached is None
    with sg.audit():
        pass
"""


def test_an_audit_that_a_failing_test_leaves_attached_is_stopped(tmp_path: Path) -> None:
    """Each later test of the process would otherwise be told that another audit is attached."""
    fixtures = Path(__file__).with_name("conftest.py")
    if fixtures.exists():
        (tmp_path / "conftest.py").write_text(fixtures.read_text())
    (tmp_path / "test_two.py").write_text(FAILS_FIRST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
