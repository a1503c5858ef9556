"""Each recipe is short, has its list of wheels, and is shown on its page; `python -m tests.recipes` runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, text_of
from tests.recipes.one import can_import

RECIPES = DOCS / "recipes"
FILES = sorted(RECIPES.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_at_most_twenty_lines(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert [text.count(f"\n# {part}\n") for part in ("Recipe", "Comparison")] == [1, 1]
    recipe = text.split("\n# Recipe\n")[1].split("\n# Comparison\n")[0]
    lines = [line for line in recipe.splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert 1 <= len(lines) <= 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_has_a_list_of_wheels_with_versions(file: Path) -> None:
    wheels = file.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    wheels = [line for line in wheels if not line.startswith("# absent: ")]
    assert wheels == sorted(wheels, key=lambda line: line.split("==")[0])
    assert [line for line in wheels if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line)] == []


def test_the_page_shows_every_recipe() -> None:
    page = text_of(RECIPES / "index.md")
    assert [file.name for file in FILES if f"{{literalinclude}} {file.name}" not in page] == []
    assert [file.name for file in FILES if f"[`{file.name}`](#" not in page] == []


def test_a_mock_stands_in_only_for_a_package_that_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that need a mocked one would meet a mock of it: scikit-learn reads SciPy's tables in C."""
    for name, text in {
        "loads_well": "",
        "loads_part": "from . import part\nimport ctypes\nctypes.CDLL('no.so')",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text, encoding="utf-8")
        (tmp_path / name / "part.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [can_import(name) for name in ("loads_well", "loads_part", "is_nowhere")] == [True, False, False]
    assert [name for name in sys.modules if name.startswith("loads_")] == ["loads_well"]
    monkeypatch.delitem(sys.modules, "loads_well")
