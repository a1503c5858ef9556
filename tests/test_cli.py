"""The command ``simplegraph``, as people run it."""

from __future__ import annotations

import configparser
import importlib.util
import json
import logging
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import simplegraph
from simplegraph import __main__ as cli
from simplegraph.base import errors

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "simplegraph", *arguments], capture_output=True, text=True)


def test_doctor_finds_nothing_wrong_on_a_machine_where_the_tests_pass() -> None:
    done = run("doctor", "--json")
    findings = json.loads(done.stdout)
    assert [finding for finding in findings if not finding["ok"]] == []
    assert {"versions", "GPU", "capture and replay", "recovery from a failed capture"} <= {f["name"] for f in findings}
    assert done.returncode == 0


def test_doctor_skips_what_is_not_here_and_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in cli._OPTIONAL else found(name))
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out.splitlines()
    extras = {"numpy": "attention", "flashinfer": "flashinfer", "transformers": "transformers", "matplotlib": "plot"}
    for package, extra in extras.items():
        assert f'skip  {package}: not installed (optional): pip install -e ".[{extra}]"' in printed
    assert 'skip  flash-attention: needs numpy, not installed: pip install -e ".[attention]"' in printed
    assert torch.cuda.is_available() or any(line.startswith("skip  GPU: none") for line in printed)


def test_doctor_fails_where_a_trial_does(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(device: torch.device) -> str:
        raise RuntimeError("a replay did not give eager's answer\nmore")

    monkeypatch.setitem(cli._TRIALS, "capture and replay", broken)
    assert cli.main(["doctor"]) == 1
    assert "FAIL  capture and replay: RuntimeError: a replay did not give eager's answer\n" in capsys.readouterr().out


def test_doctor_skips_its_trials_while_graphs_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A switch that somebody set is no broken machine."""
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "off")
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for name in cli._TRIALS:
        assert f"skip  {name}: graphs are switched off by SIMPLEGRAPH_MODE=off\n" in printed


def test_doctor_says_why_a_call_did_not_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_PADDING", "0")
    assert cli.main(["doctor"]) == 1
    said = "FAIL  capture and replay: RuntimeError: the call did not replay: this size is not in capture_sizes"
    assert said in capsys.readouterr().out


def test_the_bare_command_shows_what_to_write_and_what_to_run() -> None:
    done = run()
    assert done.returncode == 0
    for line in ("model = sg.wrap(module.eval(), capture_sizes=[1, 2, 4, 8])", "simplegraph doctor "):
        assert line in done.stdout


def test_an_extra_is_installed_as_the_package_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert errors.install_command("plot") == 'pip install -e ".[plot]"'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "simplegraph" / "base" / "errors.py"))
    assert errors.install_command("plot") == 'pip install "simple-cuda-graph[plot]"'


def test_every_extra_that_a_message_names_exists() -> None:
    """A hint that installs nothing costs its reader an hour."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    calls = re.compile(r"""install_command\(["']([\w-]+)|needs=["'][\w-]+["'], extra=["']([\w-]+)""")
    files = [path for folder in ("simplegraph", "bench", "docs") for path in (ROOT / folder).rglob("*.py")]
    named = {extra or door for path in files for extra, door in calls.findall(path.read_text(encoding="utf-8"))}
    assert {"attention", "flashinfer", "bench-models", "plot", "prometheus"} <= named
    assert named | set(cli._OPTIONAL.values()) <= set(declared["options.extras_require"])


def test_version_is_the_packages_own() -> None:
    assert run("--version").stdout.strip() == simplegraph.__version__


def test_doctor_says_which_flash_attention_it_found_and_what_that_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")

    def kernels(*tensors: object, **settings: object) -> None:
        """Stands in for a build that takes every argument."""

    found = types.ModuleType("vllm_flash_attn")
    vars(found).update(FA3_AVAILABLE=True, flash_attn_varlen_func=kernels, get_scheduler_metadata=kernels)
    monkeypatch.setitem(sys.modules, "vllm_flash_attn", found)
    assert cli._flash_attention().status == "ok"
    assert cli._flash_attention().detail.startswith("vllm_flash_attn")  # beside it another may be installed
    assert cli._flash_attention().detail.endswith("version 3, any batch in full graphs (Hopper)")


def test_doctor_leaves_the_level_of_the_log_as_it_was() -> None:
    """Else a program that calls it, as a notebook does, gets no warning of an eager call any more."""
    log = logging.getLogger("simplegraph")
    before = log.level
    cli.doctor()
    assert log.level == before
