"""What README, pages and messages tell people to type works, and no site is named that is not there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from simplegraph.attention.backends import flash_attention
from simplegraph.base.errors import install_command
from simplegraph.base.reasons import Reason
from tests.docs.pages import DOCS, PAGES, README, ROOT, blocks, prose, text_of

# Everything that an install command of ours may name, beside this folder. Each is in the registry, and is what we say.
PACKAGES = {
    *(
        "accelerate",
        "chatterbox-tts",
        "diffusers",
        "fastapi",
        "flash-attn",
        "flashinfer-python",
        "lerobot",
        "lightning",
    ),
    *("mace-torch", "stable-baselines3", "torchrl", "transformers", "triton", "ultralytics", "uvicorn", "vllm"),
}
# Everybody else's sites that texts may lead to; none is ours, since we have none.
SITES = {"docs.pytorch.org", "github.com/open-telemetry", "keepachangelog.com", "semver.org", "127.0.0.1"}

# Commands of the README that take minutes, each with the short form that the README names.
SHORT = {"python -m bench": "python -m bench --smoke"}
_INLINE = re.compile(r"`((?:python|pip|simplegraph) [^`]+)`")
_INSTALL = re.compile(r"\bpip (?:install|download) ([^\n`;]+)")
_URL = re.compile(r"https?://([\w.-]+(?:/[\w.-]+)?)")
_SOURCES = [
    path
    for folder in ("simplegraph", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_build" not in path.parts
]
_TEXTS = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "bench" / "README.md", ROOT / "setup.cfg", ROOT / "setup.py", *_SOURCES]


def readmes_commands() -> list[str]:
    """Return each command that the README shows, in blocks and in sentences."""
    lines = [line for block in blocks(README) if block.kind == "bash" for line in block.text.splitlines()]
    found = [line.partition("  #")[0] for line in lines] + _INLINE.findall(prose(README))
    return list(dict.fromkeys(part.strip() for line in found for part in line.split("&&")))


def run_by_ci() -> set[str]:
    """Return the commands that `.ci/run` takes out of the README and runs as they stand."""
    marked = re.findall(r"^<!-- ci: \w+ -->\n```bash\n(.*?)\n```$", text_of(README), re.DOTALL | re.MULTILINE)
    return {part.partition("  #")[0].strip() for block in marked for part in block.split("&&")}


def is_install(command: str) -> bool:
    return command.startswith("pip ")


def installed(arguments: str) -> set[str]:
    """Return the names that an install command's arguments ask for, this folder apart."""
    words = re.split(r"  #|&&|[`)]|\bin the\b|, ", arguments)[0]
    names = (word.strip("\"'.,") for word in words.split() if not word.startswith("-"))
    plain = (re.split(r"[\[<>=~!;]", name)[0] for name in names)
    return {name for name in plain if name and not name.startswith("{")}


def test_the_readme_shows_the_commands_that_people_need_first() -> None:
    commands = readmes_commands()
    assert "pip install ." in commands
    assert "python -m simplegraph doctor" in commands
    assert run_by_ci() == {"pip install .", 'pip install -e ".[test]"', "python -m pytest -n auto"}
    assert set(SHORT) <= set(commands)
    assert all(set(shlex.split(short)) - set(shlex.split(command)) <= {"--smoke"} for command, short in SHORT.items())
    assert "--smoke" in text_of(README)


@pytest.mark.timeout(900)  # one of them runs every benchmark's code once
@pytest.mark.parametrize(
    "command", [command for command in readmes_commands() if not is_install(command) and command not in run_by_ci()]
)
def test_a_command_of_the_readme_runs(command: str, tmp_path: Path) -> None:
    if "bench" in command and torch.cuda.is_available():
        pytest.skip("of full shapes, which take minutes")
    program, *arguments = shlex.split(SHORT.get(command, command))
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "simplegraph"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*start, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("path", _TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_install_commands_name_packages_that_are_what_we_say(path: Path) -> None:
    """The registry's `simplegraph` is another library, and ours is in no registry."""
    found = {name for arguments in _INSTALL.findall(text_of(path)) for name in installed(arguments)}
    assert found - PACKAGES == set()


def test_messages_name_packages_that_are_what_we_say() -> None:
    extras = ("flashinfer", "bench", "prometheus", "transformers")
    assert {install_command(extra) for extra in extras} == {f'pip install -e ".[{extra}]"' for extra in extras}
    assert "pip" not in flash_attention.HOW_TO_INSTALL


def test_names_are_read_out_of_install_commands() -> None:
    assert installed('-e ".[bench]" && python -m bench') == set()
    assert installed('".[transformers,prometheus]" fastapi uvicorn  # in the folder') == {"fastapi", "uvicorn"}
    assert installed("simple-cuda-graph") == {"simple-cuda-graph"}
    assert installed('"simple-cuda-graph[bench]>=1" .') == {"simple-cuda-graph"}
    assert installed("--no-deps vllm==VERSION") == {"vllm"}


@pytest.mark.parametrize("path", _TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_site_is_named_that_is_not_there(path: Path) -> None:
    text = text_of(path)
    assert not re.search(r"read-?the-?docs", text, re.IGNORECASE)
    assert [site for site in _URL.findall(text) if not any(site.startswith(known) for known in SITES)] == []


def test_reasons_name_commands_in_place_of_sites() -> None:
    assert [reason for reason in Reason if "http" in reason.text + reason.command] == []
    assert not list(ROOT.glob(".readthedocs*"))


def test_the_docs_say_how_to_install_and_what_to_keep_apart() -> None:
    for page in (README, DOCS / "getting_started.md"):
        text = " ".join(text_of(page).split())
        assert "pip install ." in text
        assert (
            "The registry's `simplegraph`, an RDF library of 2018, has the same import name: do not install both"
            in text
        )
