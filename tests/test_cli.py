"""The command ``simplegraph``, as people run it."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import simplegraph
from simplegraph import __main__ as cli
from simplegraph.base import errors
from simplegraph.base.reasons import Reason
from simplegraph.doctor.explain import explain, sections
from tests.support.attention_libraries import PlainFlash, VllmFlash, stand_in_flash

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
    extras = {"flashinfer": "flashinfer", "transformers": "transformers", "prometheus_client": "prometheus"}
    for package, extra in extras.items():
        assert f'skip  {package}: not installed (optional): pip install -e ".[{extra}]"' in printed
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
    commands = "simplegraph doctor ", "simplegraph explain capture-failed "
    for line in ("model = sg.wrap(module.eval(), capture_sizes=[1, 2, 4, 8])", *commands):
        assert line in done.stdout


def test_an_extra_is_installed_as_the_package_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert errors.install_command("bench") == 'pip install -e ".[bench]"'
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "site-packages" / "simplegraph" / "base" / "errors.py"))
    required = [
        "numpy",
        'matplotlib; extra == "bench"',
        'transformers>=5 ; extra == "transformers"',
        "scipy; extra == 'bench'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", {"simple-cuda-graph": required}.get)
    assert errors.install_command("bench") == "pip install matplotlib scipy"
    assert errors.install_command("transformers") == "pip install 'transformers>=5'"


def test_every_extra_that_a_message_names_exists() -> None:
    """A hint that installs nothing costs its reader an hour."""
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    calls = re.compile(r"""install_command\(["']([\w-]+)""")
    files = [path for folder in ("simplegraph", "bench", "docs") for path in (ROOT / folder).rglob("*.py")]
    named = {extra for path in files for extra in calls.findall(path.read_text(encoding="utf-8"))}
    assert {"flashinfer", "bench", "bench-models", "prometheus"} <= named
    assert named | set(cli._OPTIONAL.values()) <= set(declared["options.extras_require"])


class TestExplain:
    @pytest.mark.parametrize("name", [name for reason in Reason for name in (reason.value, reason.command.split()[-1])])
    def test_prints_the_section_of_each_reason(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", name]) == 0
        title, _, first, *_ = capsys.readouterr().out.splitlines()
        assert title == name.replace("_", "-")
        page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
        body = page.partition(f"\n### {title.replace('-', '_')}\n\n")[2]
        assert first.split()[:5] == body.split()[:5]

    def test_a_section_ends_where_the_next_begins_and_names_pages_in_place_of_links(self) -> None:
        said = explain("proof")
        assert " ".join(said.split()).endswith("See how it works (page how_it_works of the documentation).")
        assert explain("PROOF") == said
        assert "](" not in "".join(sections().values())

    def test_sections_fit_a_terminal_and_name_no_file_that_a_wheel_lacks(self) -> None:
        printed = {name: explain(name) for name in sections()}
        prose = {name: re.sub("^    .*$", "", text, flags=re.MULTILINE) for name, text in printed.items()}
        assert [name for name, text in prose.items() if max(map(len, text.splitlines())) > 100] == []
        assert [name for name, text in printed.items() if "docs/" in text or ".md" in text or "```" in text] == []
        assert "\n- The forward reads a value on the host" in printed["capture-failed"], "items stay on their own lines"
        assert "\n    pip download --no-deps" in printed["flash-attention"]

    def test_lists_every_section(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["explain", "--all"]) == 0
        lines = capsys.readouterr().out.splitlines()
        named = [line.split(maxsplit=1) for line in lines]
        assert {name for name, _ in named} == {r.value.replace("_", "-") for r in Reason} | {
            "flash-attention",
            "foreign-memory",
        }
        assert dict(named)["training"] == "The module is in training mode."

    def test_every_section_that_the_package_names_exists(self) -> None:
        texts = (path.read_text(encoding="utf-8") for path in (ROOT / "simplegraph").rglob("*.py"))
        named = {name for text in texts for name in re.findall(r"""explain_command\(["']([\w-]+)""", text)}
        assert {"flash-attention", "foreign-memory"} <= named
        assert named - {"NAME"} <= sections().keys()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["stale-to-often"], "nothing is called 'stale-to-often' (did you mean stale-too-often?)"),
            (["Captures_Failed"], "(did you mean capture-failed?)"),
            (["temperature"], "expected a name that `simplegraph explain --all` lists"),
            (["EscapeError"], "nothing is called 'EscapeError'; these speak of it: capture-failed; expected"),
            ([""], "nothing is called '';"),
            ([], "expected the name of a reason or of another section, or --all"),
            (["proof", "--all"], "expected the name of a reason or of another section, or --all"),
            (["proof", "grad"], "unrecognized arguments: grad"),
        ],
    )
    def test_what_it_does_not_know_is_refused_and_near_names_are_suggested(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as end:
            cli.main(["explain", *arguments])
        assert end.value.code == 2
        assert said in capsys.readouterr().err

    def test_runs_as_a_module_and_loads_no_torch(self) -> None:
        done = run("explain", "capture-failed")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("capture-failed\n\nThis size could not be captured")
        assert "torch.where" in done.stdout
        code = "from simplegraph.__main__ import main; main(['explain', '--all']); sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", f"import sys; {code}"], capture_output=True).returncode == 0

    def test_a_warnings_last_line_is_a_command_that_says_more(self, caplog: pytest.LogCaptureFixture) -> None:
        model = simplegraph.wrap(torch.nn.Linear(2, 2).train(), capture_sizes=[2], progress=False)
        model(torch.ones(2, 2))
        program, *arguments = caplog.messages[-1].splitlines()[-1].removeprefix("  See: ").split()
        assert program == "simplegraph"
        done = run(*arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("training\n\nThe module is in training mode. Call `.eval()` first")

    def test_the_page_is_built_into_the_wheel(self, tmp_path: Path) -> None:
        pytest.importorskip("setuptools")
        line = [sys.executable, "setup.py", "-q", "build", "--build-base", str(tmp_path)]
        subprocess.run([*line, "--build-lib", str(tmp_path / "lib")], cwd=ROOT, check=True, capture_output=True)
        built = tmp_path / "lib" / "simplegraph" / "doctor"
        page = ROOT / "docs" / "troubleshooting.md"
        assert (built / "troubleshooting.md").read_bytes() == page.read_bytes()
        assert not (ROOT / "simplegraph" / "doctor" / "troubleshooting.md").exists(), "`docs` has the only copy"
        line = [sys.executable, "-m", "simplegraph", "explain", "grad"]
        environ = os.environ | {"PYTHONPATH": str(tmp_path / "lib")}
        done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.stdout.startswith("grad\n\nGrad mode is on"), done.stderr

    def test_a_wheel_has_no_file_that_an_earlier_build_left(self, tmp_path: Path) -> None:
        """`build/lib` stays in the checkout: a module deleted since would be installed."""
        pytest.importorskip("setuptools")
        stale = tmp_path / "simplegraph" / "base" / "stale.py"
        stale.parent.mkdir(parents=True)
        stale.touch()
        line = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
        subprocess.run(line, cwd=ROOT, check=True, capture_output=True)
        assert not stale.exists()
        assert (stale.parent / "errors.py").is_file()


class TestImportName:
    def test_is_one_packages(self) -> None:
        assert cli._installed() == cli.Finding("import name", "ok", "simplegraph is this package, and no other one")

    @pytest.mark.parametrize("version", ["3.1.0", "0.1"])
    def test_a_clash_is_found_and_can_be_undone(self, version: str, tmp_path: Path) -> None:
        """Pip installs both without a word, and files of the later one lie over those of the earlier."""
        other = tmp_path / f"simplegraph-{version}.dist-info"
        other.mkdir()
        (other / "METADATA").write_text(f"Metadata-Version: 2.1\nName: simplegraph\nVersion: {version}\n")
        (other / "top_level.txt").write_text("simplegraph\n")
        line = [sys.executable, "-m", "simplegraph", "doctor"]
        path = os.pathsep.join([str(ROOT), str(tmp_path)])
        done = subprocess.run(line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 1
        remedy = "pip uninstall simplegraph, then install this package again, with --force-reinstall"
        assert f"FAIL  import name: simplegraph has the import name simplegraph, too: {remedy}\n" in done.stdout

    def test_files_of_another_package_over_ours_are_told_and_no_traceback(self, tmp_path: Path) -> None:
        """As they lie where the other package was installed last."""
        shutil.copytree(ROOT / "simplegraph", tmp_path / "simplegraph", ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "simplegraph" / "__init__.py").write_text("from .graph import Graph\n")
        (tmp_path / "simplegraph" / "graph.py").write_text("class Graph:\n    pass\n")
        (tmp_path / "simplegraph-1.0.1.dist-info").mkdir()
        metadata = "Metadata-Version: 2.1\nName: simplegraph\nVersion: 1.0.1\n"
        (tmp_path / "simplegraph-1.0.1.dist-info" / "METADATA").write_text(metadata)
        line = [sys.executable, "-m", "simplegraph", "doctor"]
        environ = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, "")
        said = "FAIL  import name: simplegraph has the import name simplegraph, too: pip uninstall simplegraph, then"
        assert done.stdout.startswith(said)

    def test_another_distribution_with_such_a_folder_is_found_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        owners = {"simplegraph": ["simple-cuda-graph", "graph-tools"], "torch": ["torch"]}
        monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: owners)
        assert cli._installed().status == "FAIL"
        assert cli._installed().detail.startswith(
            "graph-tools has the import name simplegraph, too: pip uninstall graph-tools"
        )


def test_version_is_the_packages_own() -> None:
    assert run("--version").stdout.strip() == simplegraph.__version__


def test_doctor_says_which_flash_attention_it_found_and_what_that_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flash(monkeypatch, VllmFlash("vllm_flash_attn", [3]), VllmFlash("vllm.vllm_flash_attn"), PlainFlash())
    found = cli._flash_attention()
    version_3 = "version 3, any batch in full graphs, on a Hopper GPU (compute capability 9)"
    version_2 = "version 2, uniform batches in full graphs, on an Ampere GPU or newer (compute capability 8)"
    both = f"vllm_flash_attn, vllm.vllm_flash_attn: {version_3}; vllm.vllm_flash_attn, flash_attn: {version_2}"
    assert (found.status, found.detail) == ("ok", both)
    stand_in_flash(monkeypatch, PlainFlash())
    assert cli._flash_attention().detail == f"flash_attn: {version_2}"
    stand_in_flash(monkeypatch)
    assert cli._flash_attention().status == "skip"


def test_doctor_leaves_the_level_of_the_log_as_it_was() -> None:
    """Else a program that calls it, as a notebook does, gets no warning of an eager call any more."""
    log = logging.getLogger("simplegraph")
    before = log.level
    cli.doctor()
    assert log.level == before


def test_explain_ends_quietly_when_nobody_reads_it_any_more() -> None:
    command = [sys.executable, "-m", "simplegraph", "explain", "--all"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(timeout=120)[1] == ""


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    imports = "from simplegraph.integrations.transformers import graph_encoder"
    code = f"import sys; sys.modules['transformers'] = None; {imports}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    said = 'simplegraph.integrations.transformers.graph_encoder needs transformers: pip install -e ".[transformers]"'
    assert said in done.stderr
