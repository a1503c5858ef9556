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
    line, tests = "return size in self.sizes", ("tests/batch/test_sizes.py",)
    assert killer(Mutant("no size is captured", "batch/sizes.py", line, "return False", tests)) is not None
    assert (
        killer(Mutant("the same in other words", "batch/sizes.py", line, "return size in (*self.sizes,)", tests))
        is None
    )
