"""Read sections of the troubleshooting page. A wheel has the page beside this file, a checkout in `docs/`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from simplegraph.base.errors import ConfigError, did_you_mean

_PACKAGED = Path(__file__).with_name("troubleshooting.md")
_IN_CHECKOUT = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
_MAX_NAMED = 5  # sections that have a word
_SECTION = re.compile(r"^### (?P<name>\w+)\n(?P<text>.*?)(?=^###? |\Z)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


@functools.cache
def sections() -> dict[str, str]:
    """Return the text of each section of the troubleshooting page, by name."""
    page = _PACKAGED if _PACKAGED.is_file() else _IN_CHECKOUT
    matches = _SECTION.finditer(page.read_text(encoding="utf-8"))
    return {section["name"].replace("_", "-"): _LINK.sub(_named, section["text"]).strip() for section in matches}


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
    """Name the section or the page that a link leads to, since a terminal follows no links."""
    text, target = link.groups()
    if target.startswith("#"):
        return text
    return f"{text} ({target if ':' in target else 'docs/' + target})"
