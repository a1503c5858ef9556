"""Read sections of the troubleshooting page as plain text: a wheel has it beside this file, a checkout in `docs`."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from simplegraph.base.errors import ConfigError, did_you_mean

_PACKAGED = Path(__file__).with_name("troubleshooting.md")
_IN_CHECKOUT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_MAX_NAMED = 5  # sections that have a word
_WIDTH = 100  # columns
_SECTION = re.compile(r"^### (?P<name>\w+)\n(?P<text>.*?)(?=^###? |\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


@functools.cache
def sections() -> dict[str, str]:
    """Return the text of each section of the troubleshooting page, by name."""
    page = _PACKAGED if _PACKAGED.is_file() else _IN_CHECKOUT
    matches = _SECTION.finditer(page.read_text(encoding="utf-8"))
    return {section["name"].replace("_", "-"): _plain(section["text"]) for section in matches}


def explain(name: str) -> str:
    """Return the section with this name, such as "capture-failed" or "capture_failed".

    Raises:
        ConfigError: there is no such section.
    """
    texts = sections()
    wanted = name.lower().replace("_", "-")
    if wanted not in texts:
        near = did_you_mean([wanted], texts)
        speaking = [section for section, text in texts.items() if name and name.lower() in text.lower()]
        about = f"; these speak of it: {', '.join(speaking[:_MAX_NAMED])}" if speaking and not near else ""
        expected = "expected a name that `simplegraph explain --all` lists"
        raise ConfigError(f"nothing is called {name!r}{near}{about}; {expected}.")
    return f"{wanted}\n\n{texts[wanted]}"


def all_names() -> str:
    """List the names of all sections, each with the beginning of its text."""
    texts = sections()
    width = max(map(len, texts))
    return "\n".join(f"{name:<{width}}  {_first_sentence(text)}" for name, text in texts.items())


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.])\s", " ".join(text.split()), maxsplit=1)[0]


def _named(link: re.Match[str]) -> str:
    """Name the page of the documentation that a link leads to: a terminal follows none, and a wheel has no pages."""
    text, target = " ".join(link[1].split()), link[2]
    if target.startswith("#"):
        return text
    page = Path(target.partition("#")[0]).stem
    return f"{text} ({target if ':' in target else f'page {page} of the documentation'})"


def _plain(text: str) -> str:
    """Return a section without Markdown's links, its lines wrapped; commands stay as they are."""
    commands = re.split(r"^```\w*\n(.*?)^```$", _LINK.sub(_named, text), flags=re.DOTALL | re.MULTILINE)
    for at, part in enumerate(commands):
        commands[at] = textwrap.indent(part, "    ") if at % 2 else "\n\n".join(_paragraphs(part)) + "\n\n"
    return "".join(commands).strip()


def _paragraphs(text: str) -> Iterator[str]:
    """Yield wrapped paragraphs; items of a list are one paragraph, a line or more each."""
    for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", text))):
        yield "\n".join(_wrapped(item) for item in re.split(r"\n(?=- )", paragraph))


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(
        " ".join(text.split()), _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
