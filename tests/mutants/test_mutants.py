"""The mutants are of the library as it is; ``python -m tests.mutants`` runs the tests against them."""

from __future__ import annotations

import pytest

from tests.mutants import __main__ as command
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


def test_a_sample_is_chosen_by_its_seed_and_ends_with_what_survives(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that every run of CI tries others, and one that fails can be run again."""

    def run(seed: str, dies: bool) -> tuple[int, list[str]]:
        tried = []
        monkeypatch.setattr(command, "killer", lambda mutant: tried.append(mutant.name) or ("a test" if dies else None))
        status = command.main(["--sample", "20", "--seed", seed])
        assert f"20 of {len(MUTANTS)} mutants, chosen by --seed {seed}\n" in capsys.readouterr().out
        return status, tried

    status, first = run("a1b2", dies=True)
    assert (status, len(set(first))) == (0, 20)
    assert run("a1b2", dies=False) == (1, first)
    assert run("c3d4", dies=True)[1] != first
