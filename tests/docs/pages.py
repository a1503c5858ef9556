"""Pages of the documentation, and their blocks, anchors and links."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from docs.tools.notebook import as_markdown

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, *sorted(path for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb"))]

_FENCED = re.compile(r"^(`{3,})(?P<kind>[^\s`]*)[ \t]*(?P<note>[^\n]*)\n(?P<text>.*?)^\1$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
_HEADING = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
_TARGET = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        kind: its language; note: the rest of the line that opens it; text: what is in it; line: where it starts.
    """

    kind: str
    note: str
    text: str
    line: int


def unprinted(shown: str, printed: str) -> list[str]:
    """Lines of a shown output that were not printed in this order; decimals and spaces vary, "..." is any lines."""

    def plain(line: str) -> str:
        return re.sub(r"\d+\.\d+", "#", " ".join(line.split()))

    rest = map(plain, printed.splitlines())
    return [line for line in shown.splitlines() if line != "..." and plain(line) not in rest]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    return as_markdown(json.loads(text)) if page.suffix == ".ipynb" else text


def blocks(page: Path) -> list[Block]:
    text = text_of(page)
    return [
        Block(found["kind"], found["note"].strip(), found["text"], text.count("\n", 0, found.start()) + 1)
        for found in _FENCED.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its blocks."""
    return _FENCED.sub("", text_of(page))


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, which every reader of Markdown makes."""
    headings = _HEADING.findall(prose(page))
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def anchors(page: Path) -> set[str]:
    """Anchors of a page, those included that only Sphinx knows."""
    return slugs(page) | {*_TARGET.findall(prose(page))}


def leads_nowhere(page: Path, link: str) -> bool:
    """True if a link to a file of this repository has no target."""
    if re.match(r"[a-z]+:", link):
        return False  # somebody else's site
    place, _, anchor = link.partition("#")
    target = page.parent / place if place else page
    if not target.exists():
        return True
    return bool(anchor) and anchor not in anchors(target)
