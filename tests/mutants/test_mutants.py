"""The mutants are of the library as it is; ``python -m tests.mutants`` runs the tests against them."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import ROOT, killer
from tests.mutants.mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutants_text_is_in_the_library_once(mutant: Mutant) -> None:
    assert (ROOT / "simplegraph" / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1
    assert all((ROOT / test).exists() for test in mutant.tests)


def test_a_mistake_is_seen_and_none_is_not() -> None:
    line, tests = "index = bisect.bisect_left(sizes, size)", ("tests/batch/test_sizes.py",)
    assert (
        killer(Mutant("sizes are padded to the next but one", "batch/sizes.py", line, f"{line} + 1", tests)) is not None
    )
    assert (
        killer(
            Mutant(
                "the same in other words",
                "batch/sizes.py",
                line,
                "index = bisect.bisect_left(tuple(sizes), size)",
                tests,
            )
        )
        is None
    )
