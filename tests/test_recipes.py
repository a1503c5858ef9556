"""The recipes' Python and the notebook's cells are run as they stand; the asserts are their own."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

RECIPES = Path(__file__).parent.parent / "bench" / "recipes"
PAGES = sorted(path.name for path in RECIPES.glob("*.md") if path.name != "README.md")
_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
_OPTIONAL = re.compile(r"^(?:from|import) (transformers|timm|diffusers|peft)\b", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs(page: str) -> None:
    namespace: dict[str, Any] = {}
    blocks = _BLOCK.findall((RECIPES / page).read_text())
    assert any("assert" in block for block in blocks)
    for block in blocks:
        missing = [name for name in _OPTIONAL.findall(block) if not importable(name)]
        if missing:
            pytest.skip(f"needs {', '.join(missing)}")
        exec(compile(block, page, "exec"), namespace)


def importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def test_every_page_is_in_the_table() -> None:
    table = (RECIPES / "README.md").read_text()
    assert len(PAGES) == 5
    assert [page for page in PAGES if f"({page})" not in table] == []


def notebook() -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads((RECIPES / "quickstart.ipynb").read_text())["cells"]
    return cells


def test_the_notebook_runs_from_top_to_bottom() -> None:
    namespace: dict[str, Any] = {}
    cells = ["".join(cell["source"]) for cell in notebook() if cell["cell_type"] == "code"]
    assert len(cells) >= 5
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), namespace)


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in notebook() if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_links_between_pages_and_notebook_lead_somewhere() -> None:
    texts = [path.read_text() for path in RECIPES.iterdir() if path.suffix in (".md", ".ipynb")]
    links = {link for text in texts for link in re.findall(r"\]\(([\w.]+)\)", text)}
    assert len(links) >= 6
    assert [link for link in links if not (RECIPES / link).exists()] == []
