"""``python -m simplegraph``, as people run it."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import pytest

import simplegraph
from simplegraph import __main__ as cli


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


def test_doctor_says_which_flash_attention_it_found_and_what_that_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    found = types.ModuleType("vllm_flash_attn")
    vars(found).update(FA2_AVAILABLE=True, FA3_AVAILABLE=False, flash_attn_varlen_func=print)
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", found)
    said = cli._flash_attention().detail.split("; ")  # beside it another may be installed
    assert any(one.startswith("vllm_flash_attn: version 2, uniform decode in full graphs") for one in said)
    assert not any(one.startswith("vllm_flash_attn: version 3") for one in said)
