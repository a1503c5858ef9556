"""Configure Sphinx: ``python -m sphinx -W -b html docs docs/_build``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar, cast

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))
import simplegraph
from docs.tools.notebook import as_markdown

project = "simplegraph"
author = "The simplegraph authors"
copyright = author
release = simplegraph.__version__
exclude_patterns = ["_build", "tools", "_static"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
default_role = "literal"  # docstrings name objects in single backticks

# Types of other projects, unqualified names in annotations, and types of rooms that are no part of the reference.
nitpicky = True
nitpick_ignore_regex = [
    ("py:class", r"(torch|numpy|collections|contextlib|os|pathlib|prometheus_client)\..*|\w+"),
    ("py:class", r".*[\[ ].*"),  # a subscripted type, and the first words of a property's docstring
    ("py:class", r"simplegraph\.(base|device|program|manager|guard|call|serve)\..*"),
    ("py:class", r"simplegraph\.(fused|training|distributed|integrations)\..*"),
    ("py:class", r"simplegraph\.attention\.(metadata|backend|layers|recurrent)\..*"),
]

html_theme = "furo"
html_title = f"simplegraph {release}"
html_static_path = ["_static"]
html_theme_options = {"navigation_with_keys": True}


class NotebookParser(MystParser):
    """Parses a stored notebook as the Markdown of its cells and outputs."""

    supported: ClassVar[tuple[str, ...]] = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(as_markdown(json.loads(inputstring)), document)


def mark_code(*event: object) -> None:
    """Mark the indented examples of a docstring as code, before its sections are read."""
    lines = cast("list[str]", event[-1])
    for place in range(len(lines) - 1, 1, -1):
        opens = lines[place].startswith("    ") and not lines[place - 1].strip()
        above = next((line for line in reversed(lines[:place]) if line.strip()), " ")
        if opens and not above.startswith(" "):
            lines[place:place] = ["::", ""]


def setup(app: Sphinx) -> None:
    """Register the parser of notebooks, and the one of examples in docstrings."""
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # 500 is where sections are read
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
