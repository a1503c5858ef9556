"""Headlines are of one state of the package, and at most a release older than the last change of what they measure."""

from __future__ import annotations

import re
import subprocess

import pytest

from bench.figures.jobs import HEADLINE_SECONDS, headline_jobs
from docs.tools import raw
from tests.docs.pages import ROOT
from tests.test_house import CORE

# What a file measures beside the core's rooms.
EXTRAS = {
    "headline/models": ["fused"],
    "headline/startup": ["fused"],
    "headline/engine": ["attention", "fused"],
    "headline/vllm": ["attention", "fused"],
    "headline/training_memory": ["training"],
}
FILES = [job.file for job in headline_jobs()]


def git(*arguments: str) -> str:
    """Run git; skip the test where there is no history: in an unpacked sdist, or a shallow clone."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no history: {done.stderr.strip()}")
    return done.stdout


def releases(commit: str = "HEAD") -> list[str]:
    """The releases of a commit's changelog, the one that it works on first."""
    return re.findall(r"^## \[([\d.]+)\]", git("show", f"{commit}:CHANGELOG.md"), re.MULTILINE)


def release(commit: str) -> str:
    """The release that a commit works on; the first one where the changelog names none yet."""
    return (releases(commit) or releases()[-1:])[0]


def behind(measured: str, changed: str, known: list[str]) -> int:
    """The releases from a measurement to a later change."""
    return known.index(measured) - known.index(changed)


def test_releases_between_a_measurement_and_a_change_are_counted() -> None:
    known = ["0.4.0", "0.3.0", "0.2.0"]
    assert [behind("0.2.0", changed, known) for changed in known] == [2, 1, 0]


@pytest.mark.parametrize("file", FILES)
def test_no_headline_is_older_than_what_it_measures_by_more_than_a_release(file: str) -> None:
    """A table must not say for years what the code of its first day took."""
    rooms = [f"simplegraph/{room}" for room in (*CORE, *EXTRAS.get(file, []))]
    measured = raw.commit(file)
    changed = git("log", "-1", "--format=%H", "--", *rooms).strip()
    assert behind(release(measured), release(changed), releases()) <= 1, f"measure {file} again"


def test_headlines_are_of_one_state_of_the_package() -> None:
    """Commits may differ where the benches or documents alone do."""
    assert len({git("rev-parse", f"{raw.commit(file)}:simplegraph") for file in FILES}) == 1


def test_a_headline_needs_one_gpu_and_no_more_than_25_minutes() -> None:
    """Jobs have limits, of which the sum may be longer: what is left out is said, the most important is first."""
    jobs = headline_jobs()
    assert {job.gpus for job in jobs} == {1}
    assert all(job.seconds <= HEADLINE_SECONDS for job in jobs)
    assert HEADLINE_SECONDS <= 1500
