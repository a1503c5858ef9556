"""Run the notebook's cells and store their outputs in it; turn a stored notebook into Markdown."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "models" / "quickstart.ipynb"


def run(cells: list[dict[str, Any]]) -> list[str]:
    """Run the code cells in one namespace; return what each prints, the value of its last line included."""
    namespace: dict[str, Any] = {}
    return [_run("".join(cell["source"]), f"cell {number}", namespace) for number, cell in enumerate(cells)]


def _run(source: str, name: str, namespace: dict[str, Any]) -> str:
    *body, last = ast.parse(source).body
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if not isinstance(last, ast.Expr):
            body, value = [*body, last], None
            exec(compile(ast.Module(body, []), name, "exec"), namespace)
        else:
            exec(compile(ast.Module(body, []), name, "exec"), namespace)
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    return printed.getvalue() + ("" if value is None else f"{value!r}\n")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    """Return the output stored in a cell."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def timeless(text: str) -> str:
    """Return a text without the numbers that differ from run to run, times and sizes, and without columns' widths."""
    return re.sub(r"\s+", " ", re.sub(r"\d+\.\d+", "", text))


def store(path: Path = NOTEBOOK) -> None:
    """Run a notebook and store its outputs, unless those that it has differ in times alone."""
    notebook = json.loads(path.read_text())
    cells = code_cells(notebook)
    printed = run(cells)
    if list(map(timeless, printed)) == [timeless(stored(cell)) for cell in cells]:
        return
    for count, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def as_markdown(notebook: dict[str, Any]) -> str:
    """Return the cells as Markdown, each output as a block below its code."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if text := stored(cell).rstrip():
            parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"
