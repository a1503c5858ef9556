"""TESTS_SHARE: of the longest tests CI runs one of three shares of the cases, and the shares are the whole."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import LONG, TESTS, outside_of_share

ROOT = Path(__file__).parents[1]
SHARES = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of a test, by pytest's name for it."""

    nodeid: str


def in_share(cases: list[Any], share: int) -> list[Any]:
    left_out = outside_of_share(cases, share, SHARES)
    return [case for case in cases if case not in left_out]


def test_shares_differ_are_of_one_size_and_together_the_whole() -> None:
    many = [Case(f"tests/{long}/test_a.py::test_b[{at}]") for long in ("sweeps", "spec_decode") for at in range(30)]
    single = [Case(f"tests/fuzz/test_c.py::test_{at}") for at in range(60)]
    others = [Case(f"tests/batch/test_d.py::test_e[{at}]") for at in range(60)]
    shares = [in_share([*many, *single, *others], share) for share in range(1, SHARES + 1)]
    assert all(share[-60:] == others for share in shares), "a test that is not long runs with every commit"
    long = [share[:-60] for share in shares]
    assert sorted(case.nodeid for share in long for case in share) == sorted(case.nodeid for case in (*many, *single))
    for share in long:
        assert len([case for case in share if case in many]) == 20
        assert 10 <= len([case for case in share if case in single]) <= 30


def test_what_is_shared_is_there() -> None:
    for long in LONG:
        path, _, test = long.partition("::")
        assert list(TESTS.glob(f"{path}*")), long
        assert not test or f"def {test}(" in (TESTS / path).read_text(encoding="utf-8"), long


def test_a_run_of_pytest_takes_its_share_from_the_environment() -> None:
    file = "tests/distributed/test_lost_ranks.py"
    collected = []
    for share in ("1/1", "1/3"):
        line = [sys.executable, "-m", "pytest", "-q", "--collect-only", file]
        environ = os.environ | {"TESTS_SHARE": share}
        done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
        collected.append([test for test in done.stdout.splitlines() if "::" in test])
    whole, third = collected
    assert set(third) < set(whole)
    assert len(third) == len(in_share([Case(test) for test in whole], 1))
