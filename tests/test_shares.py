"""TESTS_SHARE: of the longest tests CI runs one of three shares of the cases, and the shares are the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG, OTHER = "tests/training/test_stale_optimizers.py", "tests/test_skips.py"


def collected(share: str | None) -> list[str]:
    """Collect a file of many long cases, and one that is not shared."""
    environ = {name: value for name, value in os.environ.items() if name != "TESTS_SHARE"}
    environ |= {"TESTS_SHARE": share} if share else {}
    line = [sys.executable, "-m", "pytest", "-q", "--collect-only", LONG, OTHER]
    done = subprocess.run(line, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    return [test for test in done.stdout.splitlines() if "::" in test]


def test_shares_differ_are_of_one_size_and_together_the_whole() -> None:
    whole, *shares = (collected(share) for share in (None, "1/3", "2/3", "3/3"))
    assert sorted({test for share in shares for test in share}) == sorted(whole)
    of_long = [{test for test in share if LONG in test} for share in shares]
    few = set.intersection(*of_long)  # tests of few cases, all of which run
    assert sum(map(len, of_long)) == len([test for test in whole if LONG in test]) + 2 * len(few)
    assert max(map(len, of_long)) < len([test for test in whole if LONG in test]) / 2
    others = [[test for test in tests if OTHER in test] for tests in (whole, *shares)]
    assert others == others[:1] * 4
