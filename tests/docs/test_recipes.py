"""Each recipe is short, has its list of wheels, and is shown on its page; `python -m tests.recipes` runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, text_of

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
